// Launches one row of the GEMM table on checked arguments.
#pragma once

#include <stdexcept>

#include "gemm/launch.h"
#include "plan/gemm_configs.h"

namespace cutfuse {

// Throws std::invalid_argument for arguments that the kernel cannot take and std::runtime_error for a launch that
// failed; both name the kernel and the problem.
void run_gemm(GemmConfig const& config, GemmLaunch const& launch, cudaStream_t stream);

}  // namespace cutfuse
