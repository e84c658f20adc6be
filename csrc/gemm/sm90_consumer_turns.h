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

// By two named barriers, one for each warpgroup's turn. A thread's share of it.
struct ConsumerTurns {
  int warp_group;

  // The compiler learns that the warpgroup is the same for all threads of a warp.
  CUTLASS_DEVICE explicit ConsumerTurns(int thread)
      : warp_group(__shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0)) {}

  // Around all turns. The first warpgroup has the first one.
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
