// What is asked of the pointwise kernels. Host code that knows no CUDA.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/loaded_kernel.h"
#include "epilogue/program.h"
#include "pointwise/pointwise_plan.h"
#include "reduce/reduction.h"

namespace cutfuse {

struct PointwiseProblem {
  PointwiseExtents extents;
  Operand x;  // strides: outer, row, column
  Program program;
  Operands operands;
  void* out;  // contiguous
  DType out_dtype;
  // Launched where rows are whole vectors: the kernel that specialized_kernel names with this program compiled in. Null
  // for those that interpret it.
  LoadedKernel const* specialized;
};

// A derivative that is wanted: with respect to x (wrt = 0) or operand wrt - 1, each once at most.
struct WantedDerivative {
  int wrt;
  void* data;  // contiguous
  DType dtype;
};

constexpr int kMaxDerivatives = kMaxOperands + 1;

struct PointwiseBackwardProblem {
  PointwiseExtents extents;
  Operand grad;
  Operand x;
  Program program;
  Operands operands;
  int derivative_count;
  WantedDerivative derivatives[kMaxDerivatives];
  // fp32 [row_blocks, columns], or null: sums over a block's rows of the derivative with respect to x. Needs outer
  // == 1.
  float* column_partials;
  // What became of the program's value y after it: nothing, or a reduction over columns, whose gradient is that of
  // reductions.def.
  Reduction reduction;
  float const* row_result;  // fp32 [outer, rows]; where needs_result
  float const* tie_count;   // fp32 [outer, rows]; where counts_ties
  // Computes with accurate primitives whatever the type of x is: the program compares its value with the result of a
  // reduction, whose kernels do. So it is interpreted.
  bool is_accurate;
  // Launched where the problem takes it: the kernel that specialized_kernel names with the program's derivatives
  // compiled in. Null for the one that interprets them, whose results are the same.
  LoadedKernel const* specialized;
};

}  // namespace cutfuse
