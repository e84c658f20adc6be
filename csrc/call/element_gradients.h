// The gradients of y = program(x, operands) by one kernel, and sums of them by one each: of x's over rows, and of those
// of operands that are broadcast.
#pragma once

#include <vector>

#include "call/call_plan.h"
#include "call/memory.h"
#include "launch/launcher.h"

namespace cutfuse::call {

struct SumMemory {
  Memory result;  // none where nothing is summed
  Memory workspace;
};

// What a plan's launches write.
struct ElementGradients {
  std::vector<Memory> outputs;  // as in the plan
  std::vector<SumMemory> sums;  // of each output
  Memory partials;
  SumMemory column_sum;
};

// Each allocates for launches below. False, with an exception, where that failed.
bool allocate_outputs(ElementGradientPlan const& plan, ElementGradients& gradients);
bool allocate_sum(GradientSum const& sum, SumMemory& memory);

// problem: its extents, tensors, program and reduction.
void launch_gradients(ElementGradientPlan const& plan, PointwiseBackwardProblem problem,
                      ElementGradients const& gradients, Stream stream);

// Of the column sum's rows, `rows`, or of the partial sums that launch_gradients has stored.
void launch_column_sum(ColumnSum const& sum, Operand const& rows, ElementGradients const& gradients, Stream stream);
void launch_column_sum(ColumnSum const& sum, ElementGradients const& gradients, Stream stream);

// The gradient that output k stands for: what was stored, or its sum.
PyRef take_gradient(ElementGradients& gradients, size_t k);

}  // namespace cutfuse::call
