// How long fp32 kernels on CUDA cores take, predicted: in microseconds, fitted to measurements on an H200.
#pragma once

#include "plan/gemm_configs.h"
#include "plan/predictions.h"

namespace cutfuse {

double predict_fma_microseconds(GemmConfig const& config, GemmProblem const& problem, OperandBytes operand_bytes);

}  // namespace cutfuse
