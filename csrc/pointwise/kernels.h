// The pointwise kernels: a program over a tensor of any strides, and its derivatives. Their launchers, and what they
// share.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/launch.h"
#include "common/vector_access.h"
#include "epilogue/fragment_line.h"
#include "epilogue/primitives.h"
#include "epilogue/program.h"
#include "pointwise/pointwise_plan.h"

namespace cutfuse {

// out = program(x, operands): one read of every tensor, one write.
cudaError_t run_pointwise(PointwiseProblem const& problem, cudaStream_t stream);

// Each derivative is grad * weight * d program / d input, in one pass. There are no atomic operations: two runs agree.
cudaError_t run_pointwise_backward(PointwiseBackwardProblem const& problem, cudaStream_t stream);

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

// All but lines need plan.vectors, and the chain a program of chains.def; lines take anything.
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

// What the kernel of a problem that is not empty is given where it has the derivatives compiled in; plan.vectors is not
// set for a problem that such a kernel does not take.
PointwiseBackwardParameters specialized_parameters_of(PointwiseBackwardProblem const& problem);

cudaError_t launch_pointwise_backward(PointwiseBackwardParameters const& parameters, cudaStream_t stream);

// The body of the pointwise kernels that move 16-byte vectors: the loads of a thread's next elements are under way
// while it computes and stores the current ones.

// A 16-bit result hides what the fast forms lose.
template <class T>
using PrimitivesFor = std::conditional_t<std::is_same_v<T, float>, AccuratePrimitives, FastPrimitives>;

#if defined(__CUDACC__)

template <class T, int F>
struct VectorFragment {
  static constexpr int kSize = kVectorSize<T>;
  static constexpr int kPieces = F / kSize;
  Vector<T> pieces[kPieces];

  // Pieces lie `step` elements apart; those from `count` elements on are outside.
  __device__ __forceinline__ void load(T const* data, int step, int count) {
    CUTFUSE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      pieces[piece] = {};
      if (piece * step < count) pieces[piece] = load_vector(data + piece * step);
    }
  }

  __device__ __forceinline__ Fragment<F> values() const {
    Fragment<F> fragment;
    CUTFUSE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) unpack(pieces[piece], fragment.values + piece * kSize);
    return fragment;
  }
};

template <class T, int F>
__device__ __forceinline__ void store_fragment(T* data, int step, int count, Fragment<F> const& fragment) {
  constexpr int kSize = kVectorSize<T>;
  CUTFUSE_UNROLL
  for (int piece = 0; piece < F / kSize; ++piece) {
    Vector<T> packed;
    pack(fragment.values + piece * kSize, packed);
    if (piece * step < count) store_vector(data + piece * step, packed);
  }
}

// What a thread is about to compute: its elements up to `count` columns from here.
struct VectorPosition {
  int64_t outer;
  int64_t row;
  int64_t column;
  int count;
};

template <class Tensor>
__device__ __forceinline__ int64_t offset_at(Tensor const& tensor, VectorPosition const& at) {
  return at.outer * tensor.strides[0] + at.row * tensor.strides[1] + at.column;
}

// compute.begin(position) is told where a thread begins, compute.prefetch(position) where it goes on;
// compute(position, pieces) computes and stores.
template <class T, int F, class Compute>
__device__ __forceinline__ void run_vectors(PointwiseParameters const& parameters, Compute compute) {
  PointwisePlan const& plan = parameters.plan;
  PointwisePosition const start = pointwise_position(plan);
  if (start.row >= start.row_end || start.column >= plan.extents.columns) return;
  int const count = count_within(plan.extents.columns - start.column);
  int const last_count = count_within(plan.last_columns - start.column);
  int rows_left = static_cast<int>(start.row_end - start.row);
  int rows_to_last = count_within(plan.extents.rows - 1 - start.row);
  VectorPosition at = {start.outer, start.row, start.column, rows_to_last == 0 ? last_count : count};
  T const* input = static_cast<T const*>(parameters.x.data) + offset_at(parameters.x, at);
  VectorFragment<T, F> current;
  current.load(input, plan.step, at.count);
  compute.begin(at);
  CUTFUSE_NO_UNROLL
  while (true) {
    VectorFragment<T, F> next;
    rows_left -= plan.height;
    rows_to_last -= plan.height;
    input += plan.height * parameters.x.strides[1];
    int const next_count = rows_left <= 0 ? 0 : (rows_to_last == 0 ? last_count : count);
    next.load(input, plan.step, next_count);
    if (next_count > 0) compute.prefetch({at.outer, at.row + plan.height, at.column, next_count});
    compute(at, current);
    if (rows_left <= 0) return;
    at.row += plan.height;
    at.count = next_count;
    current = next;
  }
}

#endif

}  // namespace cutfuse
