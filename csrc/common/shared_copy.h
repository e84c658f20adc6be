// A block's own copy of its kernel's parameters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cutfuse {

#if defined(__CUDACC__)

// Brings the parameters into shared memory, for functions that are not inlined: where a pointer reaches them, kernel
// parameters are not cached, and each access would wait for the L2 (H200).
template <class Parameters>
__device__ __forceinline__ void copy_to_shared(Parameters const& parameters, Parameters& shared) {
  static_assert(sizeof(Parameters) % sizeof(uint4) == 0 && alignof(Parameters) % sizeof(uint4) == 0,
                "copied by vectors");
  constexpr int kVectors = sizeof(Parameters) / sizeof(uint4);
  for (int i = static_cast<int>(threadIdx.x); i < kVectors; i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<uint4*>(&shared)[i] = reinterpret_cast<uint4 const*>(&parameters)[i];
  }
  __syncthreads();
}

#endif

}  // namespace cutfuse
