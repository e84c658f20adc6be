// The launchers behind run_pointwise() and run_pointwise_backward(), and what their kernels share.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.h"
#include "epilogue/fragment_line.h"
#include "epilogue/program.h"
#include "pointwise/pointwise.h"
#include "pointwise/specialized_plan.h"

namespace cutfuse {

struct PointwiseParameters {
  PointwisePlan plan;
  Operand x;
  Output out;
  Program program;
  Operands operands;
};

// Where a thread begins, and the rows that its block covers.
struct PointwisePosition {
  int64_t outer;
  int64_t row;
  int64_t row_end;
  int64_t column;
};

#if defined(__CUDACC__)

// Divisions are skipped where they are known to be by 1: a block of a small kernel does little else before its first
// load.
__device__ __forceinline__ uint32_t divide(uint32_t x, uint32_t y) { return y == 1 ? x : x / y; }

__device__ __forceinline__ PointwisePosition pointwise_position(PointwisePlan const& plan) {
  int const y = plan.height == 1 ? 0 : static_cast<int>(threadIdx.x / static_cast<uint32_t>(plan.width));
  int const x = static_cast<int>(threadIdx.x) - y * plan.width;
  uint32_t const column_tiles = static_cast<uint32_t>(plan.column_tiles);
  uint32_t const row_tiles = static_cast<uint32_t>(plan.row_tiles);
  uint32_t const tile = divide(blockIdx.x, column_tiles);
  uint32_t const outer = plan.extents.outer == 1 ? 0 : tile / row_tiles;
  PointwisePosition position;
  position.outer = outer;
  int64_t const first_row = (tile - outer * row_tiles) * plan.tile_rows;
  position.row = first_row + y;
  position.row_end = first_row + plan.tile_rows < plan.extents.rows ? first_row + plan.tile_rows : plan.extents.rows;
  position.column = (blockIdx.x - tile * column_tiles) * plan.tile_columns + (x << plan.shift);
  return position;
}

// A line from the position on; see line_count for how far it goes.
__device__ __forceinline__ FragmentLine pointwise_line(PointwisePlan const& plan, PointwisePosition const& position) {
  FragmentLine line = {};
  line.outer = position.outer;
  line.row = position.row;
  line.column = position.column;
  line.dimension = plan.along_rows ? kAlongRows : kAlongColumns;
  line.shift = plan.shift;
  line.step = plan.step;
  return line;
}

__device__ __forceinline__ int columns_left(PointwisePlan const& plan, int64_t row, int64_t column) {
  return count_within((row == plan.extents.rows - 1 ? plan.last_columns : plan.extents.columns) - column);
}

// How many elements follow along the line in the block's rows; none or less if it begins outside.
__device__ __forceinline__ int elements_left(PointwisePlan const& plan, PointwisePosition const& position) {
  if (position.row >= position.row_end) return 0;
  if (!plan.along_rows) return columns_left(plan, position.row, position.column);
  bool const misses_last_row = position.row_end == plan.extents.rows && position.column >= plan.last_columns;
  int64_t const rows = position.row_end - (misses_last_row ? 1 : 0) - position.row;
  return position.column < plan.extents.columns ? count_within(rows) : 0;
}

// Rows from one line of a thread to its next.
__device__ __forceinline__ int rows_per_step(PointwisePlan const& plan) {
  return plan.height * (plan.along_rows ? kPointwiseFragment : 1);
}

#endif

inline int64_t block_count(PointwisePlan const& plan) {
  return plan.extents.outer * plan.row_tiles * plan.column_tiles;
}

template <class T>
constexpr int chain_elements() {
  return kChainVectors * kVectorSize<T>;
}

// What the kernel of a problem that is not empty is given.
PointwiseParameters parameters_of(PointwiseProblem const& problem, int multiprocessors);

// All but lines need plan.vectors, the chain a program of chains.def, and the specialized kernel the plan of its block;
// lines take anything.
cudaError_t launch_pointwise_specialized(LoadedKernel const& kernel, PointwiseParameters const& parameters,
                                         cudaStream_t stream);
cudaError_t launch_pointwise_vectors(PointwiseParameters const& parameters, cudaStream_t stream);
cudaError_t launch_pointwise_chain(PointwiseParameters const& parameters, cudaStream_t stream);
cudaError_t launch_pointwise_lines(PointwiseParameters const& parameters, cudaStream_t stream);

struct PointwiseBackwardParameters {
  PointwisePlan plan;
  Operand grad;
  Operand x;
  Program program;
  Operands operands;
  int32_t derivative_count;
  int32_t wrt[kMaxDerivatives];
  Output outputs[kMaxDerivatives];
  float* column_partials;
  int64_t columns;  // that a row is reduced over
  Reduction reduction;
  Operand row_result;
  Operand tie_count;
  bool is_accurate;  // the primitives
};

// What the kernel of a problem that is not empty is given, where it interprets the derivatives. And where it has them
// compiled in; plan.vectors is not set for a problem that such a kernel does not take.
PointwiseBackwardParameters interpreted_parameters_of(PointwiseBackwardProblem const& problem);
PointwiseBackwardParameters specialized_parameters_of(PointwiseBackwardProblem const& problem);

cudaError_t launch_pointwise_backward(PointwiseBackwardParameters const& parameters, cudaStream_t stream);
cudaError_t launch_pointwise_backward_specialized(LoadedKernel const& kernel,
                                                  PointwiseBackwardParameters const& parameters, cudaStream_t stream);

}  // namespace cutfuse
