// Splits an fp32 matrix into planes of 16-bit parts: see planes.h.
#pragma once

#include <cuda_runtime.h>

#include "split/split_problem.h"

namespace cutfuse {

// Launches the kernel, which reads the source once and writes the planes once.
cudaError_t run_split(SplitProblem const& problem, cudaStream_t stream);

}  // namespace cutfuse
