// The body of the pointwise kernels that move 16-byte vectors: the loads of a thread's next elements are under way
// while it computes and stores the current ones.
#pragma once

#include <type_traits>

#include "common/vector_access.h"
#include "epilogue/functors.h"
#include "pointwise/kernels.h"

namespace cutfuse {

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
