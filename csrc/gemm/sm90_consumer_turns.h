// Turns of a product's two consumer warpgroups at the tensor cores: while one promotes its sum, the other's products
// run. Left alone they share the tensor cores, finish at the same time, and leave them idle while both promote: 686
// instead of 637 us for split3 of 1024x8192x8192 (H200).
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cstdint>

#include "gemm/sm90_named_barriers.h"

namespace cutfuse {
namespace sm90 {

// By two named barriers, one for each warpgroup's turn. Without `taken` nobody waits.
template <bool taken>
struct ConsumerTurns {
  static constexpr uint32_t kThreads = 2 * cutlass::NumThreadsPerWarpGroup;

  // Around all turns. The first warpgroup has the first one.
  CUTLASS_DEVICE static void begin(int thread) {
    if (warp_group_of(thread) == 1) pass(thread);
  }
  CUTLASS_DEVICE static void end(int thread) {
    if (warp_group_of(thread) == 0) take(thread);
  }

  CUTLASS_DEVICE static void take(int thread) {
    if constexpr (taken) cutlass::arch::NamedBarrier::sync(kThreads, kFirstTurnBarrier + warp_group_of(thread));
  }
  CUTLASS_DEVICE static void pass(int thread) {
    if constexpr (taken) cutlass::arch::NamedBarrier::arrive(kThreads, kFirstTurnBarrier + (warp_group_of(thread) ^ 1));
  }

  // Of a thread among the consumers; the compiler learns that it is the same for all of a warp.
  CUTLASS_DEVICE static int warp_group_of(int thread) {
    return __shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0);
  }
};

}  // namespace sm90
}  // namespace cutfuse
