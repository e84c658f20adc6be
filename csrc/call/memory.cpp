#include "call/memory.h"

#include <utility>

namespace cutfuse::call {

bool allocate_outputs(ElementGradientPlan const& plan, PyObject* const* inputs, ElementGradients& gradients) {
  for (GradientOutput const& output : plan.outputs) {
    gradients.outputs.push_back(output.in_place ? located(PyRef::share(inputs[output.wrt])) : allocate(output.layout));
    if (!gradients.outputs.back().tensor) return false;
    gradients.sums.emplace_back();
    if (output.sum && !allocate_sum(*output.sum, gradients.sums.back())) return false;
  }
  if (!plan.column_sum) return true;
  gradients.partials = allocate(plan.column_sum->partials);
  return static_cast<bool>(gradients.partials.tensor);
}

bool allocate_sum(GradientSum const& sum, SumMemory& memory) {
  memory.result = allocate(sum.result);
  if (!memory.result.tensor) return false;
  if (!sum.workspace) return true;
  memory.workspace = allocate_bytes(sum.workspace);
  return static_cast<bool>(memory.workspace.tensor);
}

namespace {

void launch_sum(GradientSum const& sum, Operand const& x, SumMemory const& memory, Stream stream) {
  ReduceProblem problem = {};
  problem.extents = sum.extents;
  problem.x = x;
  problem.program.chain = kNoChain;
  problem.reduction = Reduction::kSum;
  problem.out = memory.result.address;
  problem.out_dtype = sum.dtype;
  problem.workspace = static_cast<float*>(memory.workspace.address);
  launcher().reduce(problem, stream);
}

}  // namespace

void launch_gradients(ElementGradientPlan const& plan, PointwiseBackwardProblem problem,
                      ElementGradients const& gradients, Stream stream) {
  for (size_t k = 0; k < plan.outputs.size(); ++k) {
    GradientOutput const& output = plan.outputs[k];
    problem.derivatives[problem.derivative_count++] = {output.wrt, gradients.outputs[k].address, output.dtype};
  }
  problem.column_partials = static_cast<float*>(gradients.partials.address);
  problem.specialized = specialize::loaded(plan.specialization, problem.program);
  launcher().pointwise_backward(problem, stream);
  for (size_t k = 0; k < plan.outputs.size(); ++k) {
    std::optional<GradientSum> const& sum = plan.outputs[k].sum;
    if (sum) launch_sum(*sum, presented(sum->x, gradients.outputs[k].address), gradients.sums[k], stream);
  }
}

void launch_column_sum(ColumnSum const& sum, Operand const& rows, ElementGradients const& gradients, Stream stream) {
  launch_sum(sum.sum, rows, gradients.column_sum, stream);
}

void launch_column_sum(ColumnSum const& sum, ElementGradients const& gradients, Stream stream) {
  launch_column_sum(sum, presented(sum.sum.x, gradients.partials.address), gradients, stream);
}

PyRef take_gradient(ElementGradients& gradients, size_t k) {
  Memory& sum = gradients.sums[k].result;
  return std::move(sum.tensor ? sum.tensor : gradients.outputs[k].tensor);
}

}  // namespace cutfuse::call
