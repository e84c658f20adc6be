// The gradients of y = program(x, operands) by one kernel, and the sum of x's over rows by another one.
#pragma once

#include <vector>

#include "call/call_plan.h"
#include "call/memory.h"
#include "launch/launcher.h"

namespace cutfuse::call {

// What a plan's launches write.
struct ElementGradients {
  std::vector<Memory> outputs;  // as in the plan
  Memory partials;
  Memory workspace;
  Memory column_sum;
};

// Each allocates for launches below. False, with an exception, where that failed.
bool allocate_outputs(ElementGradientPlan const& plan, ElementGradients& gradients);
bool allocate_column_sum(ColumnSum const& sum, ElementGradients& gradients);

// problem: its extents, tensors and program.
void launch_gradients(ElementGradientPlan const& plan, PointwiseBackwardProblem problem,
                      ElementGradients const& gradients, Stream stream);

// Of rows [row_blocks, columns].
void launch_column_sum(ColumnSum const& sum, Operand const& rows, int64_t columns, ElementGradients const& gradients,
                       Stream stream);

// The partial sums that launch_gradients has stored.
Operand partials_of(ElementGradients const& gradients, int64_t columns);

}  // namespace cutfuse::call
