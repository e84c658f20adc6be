// The named barriers of kernels that are not CUTLASS's. A thread block has sixteen, and every use in a kernel needs one
// of its own.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cstdint>

namespace cutfuse {
namespace sm90 {

// The pingpong kernel's.
constexpr uint32_t kFirstStoreBarrier = 0;  // and 1: one for each consumer warpgroup

// Those of a product over planes.
constexpr int kConsumerThreads = 2 * cutlass::NumThreadsPerWarpGroup;
constexpr uint32_t kConsumersBarrier = 0;
constexpr uint32_t kFirstTurnBarrier = 1;  // and 2: one for each consumer warpgroup

CUTLASS_DEVICE void synchronize_consumers() { cutlass::arch::NamedBarrier::sync(kConsumerThreads, kConsumersBarrier); }

}  // namespace sm90
}  // namespace cutfuse
