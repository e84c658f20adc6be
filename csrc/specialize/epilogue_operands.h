// The program of a linear layer in the kernels of its plan. Host code that knows no CUDA.
#pragma once

#include <string>
#include <vector>

#include "epilogue/program.h"
#include "plan/gemm_configs.h"
#include "plan/linear_plan.h"
#include "specialize/operand_types.h"
#include "specialize/specialization.h"

namespace cutfuse::specialize {

// How a kernel with a program compiled in takes the operands of an epilogue over [M, columns]. An address of 0 is one
// that is not known yet, and taken for aligned.
OperandTypes epilogue_operand_types(GemmConfig const& config, Program const& program, Operands const& operands,
                                    int64_t columns);

// The name of a product's kernel with a program compiled in.
std::string epilogue_kernel(LinearPlan const& plan, FusedProduct const& product);

// The program in the kernel of each product of a fused plan; empty where they interpret it for good.
std::vector<Specialization*> find_epilogues(LinearPlan const& plan, int device, Program const& program,
                                            Operands const& operands);

}  // namespace cutfuse::specialize
