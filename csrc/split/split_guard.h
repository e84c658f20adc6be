// Reads the flags that the splitting kernels have written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/macros.h"
#include "split/planes.h"

namespace cutfuse {

#if defined(__CUDACC__)

// The OR of those flags of one operand that this thread reads.
__device__ __forceinline__ uint32_t read_flags(uint32_t const* flags, int count) {
  constexpr int kLoads = 4;  // in flight, because each has the latency of the L2
  int const step = static_cast<int>(blockDim.x);
  uint32_t bits = 0;
  CUTFUSE_NO_UNROLL
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kLoads * step) {
    uint32_t words[kLoads];
    CUTFUSE_UNROLL
    for (int load = 0; load < kLoads; ++load) {
      int const index = first + load * step;
      // Does not use the read-only cache, because the kernel that writes the flags may still be running when this one
      // is launched.
      words[load] = index < count ? __ldcg(flags + index) : 0;
    }
    CUTFUSE_UNROLL
    for (int load = 0; load < kLoads; ++load) bits |= words[load];
  }
  return bits;
}

// Returns the OR of all flags to every thread of the block. All threads call it, in a one-dimensional block; it has two
// barriers.
__device__ __forceinline__ uint32_t read_guard(SplitGuard const& guard) {
  uint32_t bits = 0;
  CUTFUSE_UNROLL
  for (int operand = 0; operand < 2; ++operand) {
    if (guard.flags[operand] != nullptr) bits |= read_flags(guard.flags[operand], guard.counts[operand]);
  }
  uint32_t const out_of_range = __syncthreads_or(static_cast<int>(bits & kOutOfRange)) != 0 ? kOutOfRange : 0;
  uint32_t const not_finite = __syncthreads_or(static_cast<int>(bits & kNotFinite)) != 0 ? kNotFinite : 0;
  return out_of_range | not_finite;
}

// Whether split3 would lose accuracy. All threads call it, as read_guard().
__device__ __forceinline__ bool guard_trips(SplitGuard const& guard) { return (read_guard(guard) & kOutOfRange) != 0; }

#endif

}  // namespace cutfuse
