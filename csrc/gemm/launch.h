// The one signature that every GEMM kernel of the table is launched through.
#pragma once

#include <cuda_runtime.h>

#include "gemm/gemm_launch.h"

namespace cutfuse {

struct LaunchStatus {
  cudaError_t error;
  char const* action;  // what was being done, for the message
};

using GemmLauncher = LaunchStatus (*)(GemmLaunch const&, cudaStream_t);

}  // namespace cutfuse
