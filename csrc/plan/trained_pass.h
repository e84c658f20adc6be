// What follows a 16-bit product in a training step of compiled code, forwards and backwards: kernels of ours behind
// cuBLAS's products, or those that torch.compile's compiler makes.
#pragma once

#include <cstdint>

#include "plan/linear_request.h"

namespace cutfuse {

struct TrainedPass {
  int64_t elements;      // of the result
  float forward_bytes;   // read and written for each of them
  float backward_bytes;  // the same
  float own_cost;        // specialized_cost_of(Program), as kernels of 16 bits compute it
  float generated_cost;  // the same, accurate
  bool sums_columns;     // for the bias's gradient
  Issuer issuer;
};

// What is compared, in microseconds: see compared().
struct PassTimes {
  double own;
  double generated;
};

PassTimes compare_passes(TrainedPass const& pass);

}  // namespace cutfuse
