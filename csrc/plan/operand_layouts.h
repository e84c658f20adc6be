// How the operands of a linear layer lie in memory, as kernels that read them where they are see it.
#pragma once

#include <string>

#include "plan/gemm_problem.h"
#include "plan/linear_request.h"

namespace cutfuse {

// Why no kernel reads the operands, by their strides; empty where some do.
std::string why_lines_are_not_read(LinearRequest const& request);

// The product of operands whose lines are read.
GemmProblem problem_of(LinearRequest const& request, Product product);

// Strides in elements, as messages give them.
std::string strides_of(MatrixLayout const& matrix);

}  // namespace cutfuse
