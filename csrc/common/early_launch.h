// Programmatic dependent launch, on sm_90 and later: a kernel that starts while the one before it in its stream ends,
// which takes the start out of the time of a chain of short kernels.
#pragma once

#include <cuda_runtime.h>

namespace cutfuse {

inline cudaLaunchAttribute early_launch_attribute() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

#if defined(__CUDACC__)

// Until the kernel before has ended and its writes are seen; of no effect in a kernel that was not launched early.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel's blocks may take what room this one's leave, if it is launched early.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif

}  // namespace cutfuse
