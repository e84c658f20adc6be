// What becomes of the program before a reduction: it is taken out of a sum, or runs in the kernel, where it is
// interpreted or compiled in. Host code that knows no CUDA.
#pragma once

#include <string>

#include "reduce/reduce_plan.h"
#include "reduce/reduce_problem.h"
#include "specialize/operand_types.h"

namespace cutfuse {

struct PlannedReduce {
  ReduceProblem problem;  // turned as the layout is, and without the program where that only scales
  ReduceLayout layout;
  ReducePlan plan;
  float scale;          // of final results
  float const* weight;  // see ReduceParameters
};

// Of a problem that is not empty.
PlannedReduce plan_program(ReduceProblem const& problem, int multiprocessors);

// The name of the template for tensors of this type.
std::string reduce_template(ReducePath path, DType dtype, Reduction reduction);

// The template of the kernel that runs the problem with its program compiled in; empty where the program has to be
// interpreted, because rows are no whole vectors, there are too many of them or there is nothing to interpret. Whether
// it is empty depends on the program, extents, strides, types and alignments to 16 bytes alone.
std::string specialized_kernel(ReduceProblem const& problem);

// What that kernel has compiled in of the operands. Whatever else a tensor's strides are, only which of them are 0
// counts.
specialize::OperandTypes specialized_operands(ReduceProblem const& problem);

}  // namespace cutfuse
