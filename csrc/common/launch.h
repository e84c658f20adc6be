// Launches a kernel that takes one POD, and reports what the launch itself found wrong.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "common/ceil_divide.h"
#include "common/early_launch.h"

namespace cutfuse {

constexpr int kBlockThreads = 256;  // of every pointwise, reduction and splitting kernel

#if defined(__CUDACC__)
// A kernel that is launched early calls wait_for_previous_kernel() before it touches memory.
template <class Parameters>
cudaError_t launch(void (*kernel)(Parameters), int64_t blocks, int threads, cudaStream_t stream,
                   Parameters const& parameters, bool early = false) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  auto const grid = static_cast<unsigned>(blocks);
  auto const block = static_cast<unsigned>(threads);
  if (blocks > 0 && !early) kernel<<<grid, block, 0, stream>>>(parameters);
  if (blocks > 0 && early) {
    cudaLaunchAttribute attribute = early_launch_attribute();
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(block);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, parameters);
  }
  return cudaGetLastError();
}
#endif

// Of the current device. An attribute query takes well under a microsecond, so nothing is kept.
inline cudaError_t multiprocessor_count(int& count) {
  int device = 0;
  cudaError_t const status = cudaGetDevice(&device);
  return status != cudaSuccess ? status : cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace cutfuse
