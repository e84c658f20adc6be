// Launches a kernel that takes one POD, and reports what the launch itself found wrong.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace cutfuse {

constexpr int kBlockThreads = 256;  // of every streaming kernel

#if defined(__CUDACC__)
template <class Parameters>
cudaError_t launch(void (*kernel)(Parameters), int64_t blocks, int threads, cudaStream_t stream,
                   Parameters const& parameters) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  if (blocks > 0) kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream>>>(parameters);
  return cudaGetLastError();
}
#endif

// Of the current device. An attribute query takes well under a microsecond, so nothing is kept.
inline cudaError_t multiprocessor_count(int& count) {
  int device = 0;
  cudaError_t const status = cudaGetDevice(&device);
  return status != cudaSuccess ? status : cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

constexpr int64_t ceil_divide(int64_t x, int64_t y) { return (x + y - 1) / y; }

}  // namespace cutfuse
