// Folds the states of neighbouring threads, in an order that depends on nothing but their number.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "reduce/reductions.h"

namespace cutfuse {

constexpr int kWarpThreads = 32;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;

// Exactly the operations of a reduction known at compile time.
template <Reduction reduction>
struct StaticOperations {
  static constexpr Reduction kReduction = reduction;

  CUTFUSE_HOST_DEVICE RowState initial() const { return initial_state<reduction>(); }
  CUTFUSE_HOST_DEVICE float fill() const { return identity<reduction>(); }
  CUTFUSE_HOST_DEVICE RowState fold(RowState x, RowState y) const { return combine<reduction>(x, y); }
  template <int count, class Values>
  CUTFUSE_HOST_DEVICE void take(RowState& state, Values const& values) const {
    accumulate<reduction, count>(state, values);
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

}  // namespace cutfuse
