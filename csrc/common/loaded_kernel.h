// A CUDA kernel as a launch takes it: one of this library, or one that the driver compiled. Knows no CUDA.
#pragma once

#include <atomic>
#include <cstdint>

namespace cutfuse {

struct LoadedKernel {
  void const* function;                        // what cudaLaunchKernelExC takes: a function's address or a cudaKernel_t
  std::atomic<uint64_t> prepared_devices = 0;  // bit d: device d allows it the shared memory that it needs
  int source = -1;                             // the operand that a GEMM kernel fetches ahead of its use; -1 for none
};

constexpr int source_of(LoadedKernel const* kernel) { return kernel == nullptr ? -1 : kernel->source; }

}  // namespace cutfuse
