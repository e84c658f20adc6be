// The two consumer warpgroups of a product take turns at the tensor cores: while one adds its sum to the accumulators,
// the other's products run. Without turns they share the tensor cores, finish at the same time and leave the tensor
// cores idle while both add: split3 of 1024x8192x8192 then takes 686 us instead of 637 (H200).
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cstdint>

#include "gemm/sm90_named_barriers.h"

namespace cutfuse {
namespace sm90 {

// A thread's view of the turns. Each warpgroup waits for its turn at a named barrier of its own.
struct ConsumerTurns {
  int warp_group;

  // The shuffle tells the compiler that all threads of a warp have the same warpgroup.
  CUTLASS_DEVICE explicit ConsumerTurns(int thread)
      : warp_group(__shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0)) {}

  // begin() and end() enclose all turns of a block. The first warpgroup has the first turn.
  CUTLASS_DEVICE void begin() const {
    if (warp_group == 1) pass();
  }
  CUTLASS_DEVICE void end() const {
    if (warp_group == 0) take();
  }

  CUTLASS_DEVICE void take() const {
    cutlass::arch::NamedBarrier::sync(kConsumerThreads, kFirstTurnBarrier + warp_group);
  }
  CUTLASS_DEVICE void pass() const {
    cutlass::arch::NamedBarrier::arrive(kConsumerThreads, kFirstTurnBarrier + (warp_group ^ 1));
  }
};

}  // namespace sm90
}  // namespace cutfuse
