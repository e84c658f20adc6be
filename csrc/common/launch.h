// How kernels that take one POD are launched, those of this library and those that the driver compiled, and how they
// begin.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <string>

#include "common/division.h"
#include "common/loaded_kernel.h"

namespace cutfuse {

// Programmatic dependent launch, on sm_90 and later: a kernel that starts while the one before it in its stream ends,
// which takes the start out of the time of a chain of short kernels.
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

// Of an action that failed, for its message.
inline std::string failure_of(std::string const& action, cudaError_t status) {
  return action + " failed with " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")";
}

// Of the current device. An attribute query takes well under a microsecond, so nothing is kept.
inline cudaError_t multiprocessor_count(int& count) {
  int device = 0;
  cudaError_t const status = cudaGetDevice(&device);
  return status != cudaSuccess ? status : cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

// A kernel that the driver compiled.
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
