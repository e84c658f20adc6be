// What a GEMM kernel needs to be told of on each device before it is launched there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/loaded_kernel.h"

namespace cutfuse {

// Allows a kernel its shared memory on the current device. It remembers the first 64 devices for which it has done so,
// because setting an attribute takes the host about a microsecond.
inline cudaError_t allow_shared_memory(LoadedKernel& kernel, int bytes) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if (status != cudaSuccess || (kernel.prepared_devices.load(std::memory_order_relaxed) & bit) != 0) return status;
  status = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) kernel.prepared_devices.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

}  // namespace cutfuse
