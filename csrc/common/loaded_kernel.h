// A CUDA kernel as a launch takes it: one of this library, or one that the driver compiled. Knows no CUDA.
#pragma once

#include <atomic>
#include <cstdint>

namespace cutfuse {

// The operands that a GEMM kernel brings to shared memory ahead of their use.
struct StagedOperands {
  int source = -1;      // the matrix that the copy engine brings; -1 for none
  uint8_t rows = 0;     // bit k: operand k is one row
  uint8_t columns = 0;  // bit k: operand k is one column, or one element
};

struct LoadedKernel {
  void const* function;                       // what cudaLaunchKernelExC takes: a function's address or a cudaKernel_t
  std::atomic<uint64_t> allowed_devices = 0;  // bit d: device d allows it the shared memory that it needs
  StagedOperands staged = {};
};

constexpr StagedOperands staged_by(LoadedKernel const* kernel) {
  return kernel == nullptr ? StagedOperands() : kernel->staged;
}

}  // namespace cutfuse
