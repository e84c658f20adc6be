// How the kernels of the GEMM table are launched: through one signature, on checked arguments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>

#include "common/loaded_kernel.h"
#include "gemm/gemm_launch.h"
#include "plan/gemm_configs.h"

namespace cutfuse {

struct LaunchStatus {
  cudaError_t error;
  char const* action;  // what was being done, for the message
};

using GemmLauncher = LaunchStatus (*)(GemmLaunch const&, cudaStream_t);

// Allows a kernel its shared memory on the current device. It remembers the first 64 devices for which it has done so,
// because setting an attribute takes the host about a microsecond.
inline cudaError_t allow_shared_memory(LoadedKernel& kernel, int bytes) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if (status != cudaSuccess || (kernel.allowed_devices.load(std::memory_order_relaxed) & bit) != 0) return status;
  status = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) kernel.allowed_devices.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

// Launches a kernel, which takes one struct of parameters, with the shared memory of the configuration.
inline LaunchStatus launch_kernel(LoadedKernel& kernel, cudaLaunchConfig_t const& config, void* parameters) {
  cudaError_t status = allow_shared_memory(kernel, static_cast<int>(config.dynamicSmemBytes));
  if (status != cudaSuccess) return {status, "setting the shared memory size"};
  void* arguments[] = {parameters};
  status = cudaLaunchKernelExC(&config, kernel.function, arguments);
  if (status != cudaSuccess) cudaGetLastError();  // clears the error, which the next launch would otherwise report
  return {status, "launching the kernel"};
}

// Throws std::invalid_argument for arguments that the kernel cannot take and std::runtime_error for a launch that
// failed; both name the kernel and the problem.
void run_gemm(GemmConfig const& config, GemmLaunch const& launch, cudaStream_t stream);

}  // namespace cutfuse
