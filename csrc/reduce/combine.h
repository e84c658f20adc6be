// Folds the states of a block's threads, in an order that depends on nothing but their number: of neighbours, and in
// the strided kernels of those that hold the same columns.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/launch.h"
#include "reduce/kernels.h"
#include "reduce/reduce_plan.h"
#include "reduce/reductions.h"

namespace cutfuse {

constexpr int kWarpThreads = 32;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;

// Exactly the operations of a reduction known at compile time.
template <Reduction reduction>
struct StaticOperations {
  using Fold = FoldOf<reduction>;

  CUTFUSE_HOST_DEVICE RowState initial() const { return {fill(), 0.0f}; }
  CUTFUSE_HOST_DEVICE float fill() const { return Fold::kIdentity; }
  CUTFUSE_HOST_DEVICE RowState fold(RowState x, RowState y) const { return Fold::combine(x, y); }
  template <int count, class Values>
  CUTFUSE_HOST_DEVICE void take(RowState& state, Values const& values) const {
    Fold::template accumulate<count>(state, values);
  }
};

// The same, with the reduction known at run time: beside a program's interpretation the branches cost little.
struct RuntimeOperations {
  Reduction reduction;

  CUTFUSE_HOST_DEVICE RowState initial() const { return initial_state_any(reduction); }
  CUTFUSE_HOST_DEVICE float fill() const { return identity_any(reduction); }
  CUTFUSE_HOST_DEVICE RowState fold(RowState x, RowState y) const { return combine_any(reduction, x, y); }
  template <int count, class Values>
  CUTFUSE_HOST_DEVICE void take(RowState& state, Values const& values) const {
    accumulate_any<count>(reduction, state, values);
  }
};

#if defined(__CUDACC__)

// Folds groups of `lanes` threads, a power of two up to a warp. Every thread of the warp takes part; every thread of a
// group gets the same bits, because combining is commutative to the bit.
template <class Operations>
__device__ __forceinline__ RowState combine_lanes(Operations operations, RowState state, int lanes) {
  CUTFUSE_NO_UNROLL
  for (int distance = 1; distance < lanes; distance *= 2) {
    RowState const other = {__shfl_xor_sync(0xffffffffu, state.a, distance),
                            __shfl_xor_sync(0xffffffffu, state.b, distance)};
    state = operations.fold(state, other);
  }
  return state;
}

// Folds groups of `lanes` threads, a power of two up to the block. The first thread of a group gets the result.
template <class Operations>
__device__ __forceinline__ RowState combine_threads(Operations operations, RowState state, int lanes) {
  state = combine_lanes(operations, state, lanes < kWarpThreads ? lanes : kWarpThreads);
  if (lanes > kWarpThreads) {
    __shared__ RowState warps[kBlockWarps];
    int const warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    if (threadIdx.x % kWarpThreads == 0) warps[warp] = state;
    __syncthreads();
    if ((static_cast<int>(threadIdx.x) & (lanes - 1)) == 0) {
      for (int i = 1; i < lanes / kWarpThreads; ++i) state = operations.fold(state, warps[warp + i]);
    }
  }
  return state;
}

#endif

// The strided kernels' index arithmetic.

// What one thread reads. Its vector in super-row k begins at element start + k * super_row of the outer slice's span,
// where elements are numbered as if rows lay side by side. Super-rows [full_begin, full_end) hold a whole vector.
struct StridedThread {
  int64_t start;  // negative when the first vector begins before a slice that is not 16-byte aligned
  int64_t super_row;
  int64_t length;
  int64_t full_begin;
  int64_t full_end;
};

// column: which of the super-row's threads. past_boundary: how far the outer slice begins past a 16-byte boundary, in
// elements; 0 unless the slice is one contiguous span.
CUTFUSE_HOST_DEVICE StridedThread strided_thread(ReduceExtents const& extents, ReducePlan const& plan, int64_t column,
                                                 int past_boundary) {
  StridedThread thread = {};
  thread.start = column * plan.vector - past_boundary;
  thread.super_row = plan.rows_per_super_row * extents.inner;
  thread.length = extents.reduced * extents.inner;
  thread.full_begin = thread.start < 0 ? 1 : 0;
  int64_t const room = thread.length - plan.vector - thread.start;
  thread.full_end = room < 0 ? 0 : room / thread.super_row + 1;
  return thread;
}

// Where element j of a thread's vectors goes: which row of its super-row, and which column.
struct StridedElement {
  int row;
  int64_t column;
};

CUTFUSE_HOST_DEVICE StridedElement strided_element(ReduceExtents const& extents, StridedThread const& thread, int j) {
  int64_t const element = thread.start + j;
  int64_t const wrapped = element < 0 ? element + thread.super_row : element;
  int64_t const row = wrapped / extents.inner;
  return {static_cast<int>(row), wrapped - row * extents.inner};
}

// The end of the strided kernels: folds the states of a block's threads that hold the same columns, and stores them.

#if defined(__CUDACC__)

// Where a block's thread stands: see ReducePlan.
struct BlockPosition {
  int x;  // along the super-row
  int y;  // along the reduced dimension
  int64_t split;
  int64_t outer;
  int64_t column;  // which thread of the super-row
  bool active;
};

__device__ __forceinline__ BlockPosition block_position(ReduceExtents const& extents, ReducePlan const& plan) {
  BlockPosition position;
  position.y = static_cast<int>(threadIdx.x) / plan.width;
  position.x = static_cast<int>(threadIdx.x) - position.y * plan.width;
  int64_t const tiles = (extents.outer * plan.period + plan.width - 1) / plan.width;
  position.split = plan.splits == 1 ? 0 : blockIdx.x / tiles;
  int64_t const index = (blockIdx.x - position.split * tiles) * plan.width + position.x;
  position.active = index < extents.outer * plan.period;
  position.outer = position.active ? index / plan.period : 0;
  position.column = index - position.outer * plan.period;
  return position;
}

// Half of the threads at most hand their states over at a time.
constexpr int kHandedOver = kBlockThreads / 2;

template <int vector>
struct ColumnStorage {
  RowState states[kHandedOver * vector];
};

// Folds the states of threads above each other, pairwise: the first row of threads gets the result. States of one
// column lie side by side, so that neighbouring threads take different banks.
template <int vector, class Operations, class Position>
__device__ __forceinline__ void combine_height(Operations operations, RowState (&states)[vector],
                                               ColumnStorage<vector>& storage, Position const& position,
                                               ReducePlan const& plan) {
  CUTFUSE_NO_UNROLL
  for (int height = plan.height; height > 1;) {
    int const half = (height + 1) / 2;
    if (position.y >= half && position.y < height) {
      int const slot = (position.y - half) * plan.width + position.x;
      CUTFUSE_UNROLL
      for (int j = 0; j < vector; ++j) storage.states[j * kHandedOver + slot] = states[j];
    }
    __syncthreads();
    if (position.y + half < height) {
      int const slot = position.y * plan.width + position.x;
      CUTFUSE_UNROLL
      for (int j = 0; j < vector; ++j) states[j] = operations.fold(states[j], storage.states[j * kHandedOver + slot]);
    }
    __syncthreads();
    height = half;
  }
}

template <int vector, class Operations>
__device__ __forceinline__ void combine_columns(Operations operations, RowState (&states)[vector],
                                                ReduceParameters const& parameters, BlockPosition const& position,
                                                StridedThread const& thread) {
  __shared__ ColumnStorage<vector> storage;
  ReduceExtents const& extents = parameters.extents;
  ReducePlan const& plan = parameters.plan;
  combine_height<vector>(operations, states, storage, position, plan);
  int const super_row = plan.rows_per_super_row;
  bool const block_holds_period = super_row > 1 && plan.width == plan.period;
  bool const stores = position.active && position.y == 0;
  if (!block_holds_period) {
    CUTFUSE_UNROLL
    for (int j = 0; j < vector; ++j) {
      StridedElement const element = strided_element(extents, thread, j);
      if (stores && element.column < extents.inner && element.row < super_row) {
        store_result(parameters, position.split * super_row + element.row,
                     position.outer * extents.inner + element.column, states[j]);
      }
    }
    return;
  }
  if (stores) {
    CUTFUSE_UNROLL
    for (int j = 0; j < vector; ++j) {
      StridedElement const element = strided_element(extents, thread, j);
      storage.states[element.row * extents.inner + element.column] = states[j];
    }
  }
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.x); column < extents.inner; column += static_cast<int>(blockDim.x)) {
    RowState state = storage.states[column];
    for (int row = 1; row < super_row; ++row) {
      state = operations.fold(state, storage.states[row * extents.inner + column]);
    }
    store_result(parameters, position.split, position.outer * extents.inner + column, state);
  }
}

#endif

}  // namespace cutfuse
