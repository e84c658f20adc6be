// Launches a kernel that the driver compiled.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "common/loaded_kernel.h"

namespace cutfuse {

template <class Parameters>
cudaError_t launch_loaded(LoadedKernel const& kernel, int64_t blocks, int threads, cudaStream_t stream,
                          Parameters const& parameters) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  void* arguments[] = {const_cast<Parameters*>(&parameters)};
  cudaError_t const status = cudaLaunchKernelExC(&config, kernel.function, arguments);
  if (status != cudaSuccess) cudaGetLastError();  // clears the error, which the next launch would otherwise report
  return status;
}

}  // namespace cutfuse
