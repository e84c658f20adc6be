// The one signature that every GEMM kernel of the table is launched through.
#pragma once

#include <cuda_runtime.h>

#include "epilogue/program.h"
#include "gemm/problem.h"

namespace cutfuse {

// What a row of the table writes: the matrix in the operands' own type, the matrix in fp32, or row partials.
enum class GemmOutput { kSame, kFloat32, kRows };

struct GemmLaunch {
  GemmProblem problem;
  GemmBuffers buffers;
  Program program;
  Operands operands;
  int swizzle;          // tiles along one dimension that are kept together for the L2
  bool raster_along_m;  // which dimension the tile scheduler walks first
};

struct LaunchStatus {
  cudaError_t error;
  char const* action;  // what was being done, for the message
};

using GemmLauncher = LaunchStatus (*)(GemmLaunch const&, cudaStream_t);

}  // namespace cutfuse
