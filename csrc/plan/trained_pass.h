// A 16-bit layer in a training step of compiled code, by cuBLAS's products: what follows them, forwards and backwards,
// in kernels of ours or in those that torch.compile's compiler makes.
#pragma once

#include <cstdint>

#include "plan/linear_request.h"

namespace cutfuse {

struct TrainedLayer {
  int64_t m;
  int64_t n;
  int64_t k;
  float forward_bytes;   // what passes read and write for each element of the result
  float backward_bytes;  // the same
  float own_cost;        // specialized_cost_of(Program), as kernels of 16 bits compute it
  float generated_cost;  // see generated_cost_of(Program)
  bool sums_columns;     // for the bias's gradient
  int32_t multiprocessors;
  Issuer issuer;
};

// Of the layer's step in microseconds: the device's time, or the host's where it takes longer to issue the launches.
struct StepTimes {
  double own;
  double generated;
};

StepTimes compare_passes(TrainedLayer const& layer);

}  // namespace cutfuse
