// What the kernel library was compiled with, for bug reports. It travels with the library: a module that is linked with
// one built elsewhere (CUTFUSE_PREBUILT_KERNELS) tells of that build.
#pragma once

#include <map>
#include <string>

namespace cutfuse {

// The compilers, and the architectures of GEMM kernels and of the others; empty texts of what there is without kernels.
std::map<std::string, std::string> build_info();

}  // namespace cutfuse
