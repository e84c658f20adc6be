// What is asked of the reduction kernels. Host code that knows no CUDA.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/loaded_kernel.h"
#include "epilogue/program.h"
#include "reduce/reduce_plan.h"
#include "reduce/reduction.h"

namespace cutfuse {

struct ReduceProblem {
  ReduceExtents extents;
  Operand x;  // strides: outer, reduced, inner
  Program program;
  Operands operands;
  Reduction reduction;
  void* out;  // [outer, inner], contiguous
  DType out_dtype;
  float* workspace;  // reduce_workspace bytes
  // Launched where rows are whole vectors: the kernel that specialized_kernel names with this program compiled in. Null
  // for those that interpret it.
  LoadedKernel const* specialized;
};

// Partial states of a row reduction, fp32 [tiles, rows] (two floats each for logsumexp, one otherwise), to be folded to
// out [rows], times scale.
struct FoldProblem {
  float const* partials;
  int64_t tiles;
  int64_t rows;
  Reduction reduction;
  int64_t count;  // elements that a row's states cover together, which the mean divides by
  void* out;
  DType out_dtype;
};

}  // namespace cutfuse
