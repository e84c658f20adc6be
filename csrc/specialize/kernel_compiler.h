// What compiles a program into a kernel: the CUDA driver, or what a test puts in its place.
#pragma once

#include <string>
#include <string_view>

#include "epilogue/program.h"
#include "specialize/operand_types.h"

namespace cutfuse::specialize {

class KernelCompiler {
 public:
  virtual ~KernelCompiler() = default;
  // Why it can compile nothing; empty where it can.
  virtual std::string why_not() const = 0;
  // The kernel with the program compiled in, loaded on the device, as cudaLaunchKernelExC takes it. Any thread may
  // call it, in which the device may be current afterwards. Throws std::runtime_error with the reason where it cannot
  // be had.
  virtual void const* compile(std::string_view kernel, int device, Program const& program,
                              OperandTypes const& types) = 0;
};

// The one of this build: the driver, or one that throws in a build without kernels.
KernelCompiler& driver_compiler();

// What compiles now: driver_compiler(), unless a test has put another in its place. Null puts it back.
KernelCompiler& kernel_compiler();
void use_kernel_compiler(KernelCompiler* other);

}  // namespace cutfuse::specialize
