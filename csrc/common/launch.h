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

// Programmatic dependent launch, on sm_90 and later: a kernel starts while the one before it in its stream ends, which
// takes the start out of the time of a chain of short kernels. All kernels of this library are launched so. Every
// thread of one waits for the previous one before it reads or writes global memory, which the previous one may still
// write or read. No load may be of the read-only cache (ld.global.nc, __ldg): the compiler may move it to before the
// wait.
inline cudaLaunchAttribute early_launch_attribute() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Whether the current device does.
inline bool launches_early() {
  int device = 0;
  int major = 0;
  bool const is_known = cudaGetDevice(&device) == cudaSuccess &&
                        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess;
  return is_known && major >= 9;
}

#if defined(__CUDACC__)

// Until the previous kernel has ended and its writes are seen; of no effect in a kernel that was not launched early.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel's blocks may take what room this one's leave, if it is launched early. Kernels call it
// first: it takes effect once all their blocks have begun, when there are no others to be kept from that room, and the
// next kernel waits for the end of this one whenever it starts.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For kernels that have nothing to prepare before they touch global memory.
__device__ __forceinline__ void begin_behind_previous_kernel() {
  let_next_kernel_start();
  wait_for_previous_kernel();
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

// Whether kernels of this translation unit wait for the previous one on the current device: they do in code for sm_90
// or later, which such a device runs where there is any (CutfuseKernels.cmake sees to it).
inline bool kernels_wait() {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  constexpr int kLatest = kArchitectures[sizeof(kArchitectures) / sizeof(int) - 1];  // in ascending order
  return kLatest >= 900 && launches_early();
}

// Launches a kernel that calls begin_behind_previous_kernel().
template <class Parameters>
cudaError_t launch(void (*kernel)(Parameters), int64_t blocks, int threads, cudaStream_t stream,
                   Parameters const& parameters) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  if (blocks == 0) return cudaGetLastError();
  cudaLaunchAttribute attribute = early_launch_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = kernels_wait() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, parameters);
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

// A kernel that the driver compiled for the current device: its text waits where launches_early().
template <class Parameters>
cudaError_t launch_loaded(LoadedKernel const& kernel, int64_t blocks, int threads, cudaStream_t stream,
                          Parameters const& parameters) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute attribute = early_launch_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = launches_early() ? 1 : 0;
  void* arguments[] = {const_cast<Parameters*>(&parameters)};
  cudaError_t const status = cudaLaunchKernelExC(&config, kernel.function, arguments);
  if (status != cudaSuccess) cudaGetLastError();  // clears the error, which the next launch would otherwise report
  return status;
}

}  // namespace cutfuse
