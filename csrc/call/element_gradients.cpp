#include "call/element_gradients.h"

namespace cutfuse::call {

bool allocate_outputs(ElementGradientPlan const& plan, ElementGradients& gradients) {
  for (GradientOutput const& output : plan.outputs) {
    gradients.outputs.push_back(allocate(output.layout));
    if (!gradients.outputs.back().tensor) return false;
  }
  if (!plan.column_sum) return true;
  gradients.partials = allocate(plan.column_sum->partials);
  return static_cast<bool>(gradients.partials.tensor);
}

bool allocate_column_sum(ColumnSum const& sum, ElementGradients& gradients) {
  gradients.column_sum = allocate(sum.result);
  if (!gradients.column_sum.tensor) return false;
  if (!sum.workspace) return true;
  gradients.workspace = allocate_bytes(sum.workspace);
  return static_cast<bool>(gradients.workspace.tensor);
}

void launch_gradients(ElementGradientPlan const& plan, PointwiseBackwardProblem problem,
                      ElementGradients const& gradients, Stream stream) {
  for (size_t k = 0; k < plan.outputs.size(); ++k) {
    GradientOutput const& output = plan.outputs[k];
    problem.derivatives[problem.derivative_count++] = {output.wrt, gradients.outputs[k].address, output.dtype};
  }
  problem.column_partials = static_cast<float*>(gradients.partials.address);
  problem.reduction = Reduction::kNone;
  problem.specialized = specialize::loaded(plan.specialization);
  launcher().pointwise_backward(problem, stream);
}

void launch_column_sum(ColumnSum const& sum, Operand const& rows, int64_t columns, ElementGradients const& gradients,
                       Stream stream) {
  ReduceProblem problem = {};
  problem.extents = {1, sum.row_blocks, columns};
  problem.x = rows;
  problem.program.chain = kNoChain;
  problem.reduction = Reduction::kSum;
  problem.out = gradients.column_sum.address;
  problem.out_dtype = sum.dtype;
  problem.workspace = static_cast<float*>(gradients.workspace.address);
  launcher().reduce(problem, stream);
}

Operand partials_of(ElementGradients const& gradients, int64_t columns) {
  return {gradients.partials.address, {0, columns, 1}, DType::kFloat32};
}

}  // namespace cutfuse::call
