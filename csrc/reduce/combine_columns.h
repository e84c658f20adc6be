// The end of the strided kernels: folds the states of a block's threads that hold the same columns, and stores them.
#pragma once

#include "reduce/block_combine.h"
#include "reduce/store_result.h"
#include "reduce/strided_layout.h"

namespace cutfuse {

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
