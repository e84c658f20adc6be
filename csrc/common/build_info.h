// What the kernel library was compiled with, for bug reports. It travels with the library: a module that is linked with
// one built elsewhere (CUTFUSE_PREBUILT_KERNELS) tells of that build.
#pragma once

namespace cutfuse {

struct BuildInfo {
  char const* host_compiler;
  char const* cuda_compiler;  // nvcc's version; empty without kernels, as are the architectures
  char const* gemm_architectures;
  char const* portable_architectures;  // of the pointwise, reduction and splitting kernels
};

BuildInfo build_info();

}  // namespace cutfuse
