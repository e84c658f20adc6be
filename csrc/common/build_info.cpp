#include "common/build_info.h"

// CutfuseKernels.cmake defines these in a build with kernels.
#ifndef CUTFUSE_CUDA_COMPILER
#define CUTFUSE_CUDA_COMPILER ""
#define CUTFUSE_GEMM_ARCHITECTURES ""
#define CUTFUSE_PORTABLE_ARCHITECTURES ""
#endif

namespace cutfuse {

std::map<std::string, std::string> build_info() {
#if defined(__clang__)
  constexpr char const* kCompiler = __VERSION__;
#else
  constexpr char const* kCompiler = "GCC " __VERSION__;
#endif
  return {{"host_compiler", kCompiler},
          {"cuda_compiler", CUTFUSE_CUDA_COMPILER},
          {"gemm_architectures", CUTFUSE_GEMM_ARCHITECTURES},
          {"portable_architectures", CUTFUSE_PORTABLE_ARCHITECTURES}};
}

}  // namespace cutfuse
