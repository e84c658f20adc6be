// A program over a tensor of any strides, and its derivatives.
#pragma once

#include <cuda_runtime.h>

#include "pointwise/pointwise_problem.h"

namespace cutfuse {

// out = program(x, operands): one read of every tensor, one write.
cudaError_t run_pointwise(PointwiseProblem const& problem, cudaStream_t stream);

// Each derivative is grad * weight * d program / d input, in one pass. There are no atomic operations: two runs agree.
cudaError_t run_pointwise_backward(PointwiseBackwardProblem const& problem, cudaStream_t stream);

}  // namespace cutfuse
