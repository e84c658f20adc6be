// A program over a tensor of any strides, and its derivatives.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "epilogue/program.h"
#include "pointwise/pointwise_plan.h"

namespace cutfuse {

struct PointwiseProblem {
  PointwiseExtents extents;
  Operand x;  // strides: outer, row, column
  Program program;
  Operands operands;
  void* out;  // contiguous
  DType out_dtype;
};

// out = program(x, operands): one read of every tensor, one write.
cudaError_t run_pointwise(PointwiseProblem const& problem, cudaStream_t stream);

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
  // What became of the program's value y after it: nothing, or a reduction over columns, whose weights are
  //   sum 1, mean 1 / columns, amax and amin (y == row_result) / tie_count, logsumexp exp(y - row_result).
  Reduction reduction;
  float const* row_result;  // fp32 [outer, rows]; for amax, amin, logsumexp
  float const* tie_count;   // fp32 [outer, rows]; for amax, amin
};

// Each derivative is grad * weight * d program / d input, in one pass. There are no atomic operations: two runs agree.
cudaError_t run_pointwise_backward(PointwiseBackwardProblem const& problem, cudaStream_t stream);

}  // namespace cutfuse
