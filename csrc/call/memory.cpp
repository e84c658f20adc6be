#include "call/memory.h"

#include <utility>

namespace cutfuse::call {

bool allocate_gradients(GradientSteps const& plan, PyObject* const* inputs, ElementGradients& gradients) {
  WantedDerivative const* derivative = plan.problem.derivatives;
  for (GradientOutput const& output : plan.outputs) {
    int const wrt = (derivative++)->wrt;
    gradients.outputs.push_back(output.in_place ? located(PyRef::share(inputs[wrt])) : allocate(output.layout));
    if (!gradients.outputs.back().tensor) return false;
    gradients.sums.emplace_back();
    if (output.sum && !allocate_sum(*output.sum, gradients.sums.back())) return false;
  }
  if (!plan.column_sum) return true;
  gradients.partials = allocate(plan.column_sum->partials);
  return gradients.partials.tensor && allocate_sum(plan.column_sum->sum, gradients.column_sum);
}

bool allocate_sum(GradientSum const& sum, SumMemory& memory) {
  memory.result = allocate(sum.result);
  if (!memory.result.tensor) return false;
  if (!sum.workspace) return true;
  memory.workspace = allocate_bytes(sum.workspace);
  return static_cast<bool>(memory.workspace.tensor);
}

void launch_gradients(GradientSteps const& plan, PointwiseBackwardProblem problem, ElementGradients const& gradients,
                      Stream stream) {
  for (size_t k = 0; k < plan.outputs.size(); ++k) problem.derivatives[k].data = gradients.outputs[k].address;
  problem.column_partials = static_cast<float*>(gradients.partials.address);
  problem.specialized = specialize::loaded(plan.specialization, problem.program);
  launcher().pointwise_backward(problem, stream);
  for (size_t k = 0; k < plan.outputs.size(); ++k) {
    std::optional<GradientSum> const& sum = plan.outputs[k].sum;
    if (sum) launch_sum(*sum, gradients.outputs[k].address, gradients.sums[k], stream);
  }
  if (plan.column_sum) launch_sum(plan.column_sum->sum, gradients.partials.address, gradients.column_sum, stream);
}

void launch_sum(GradientSum const& sum, void const* data, SumMemory const& memory, Stream stream) {
  ReduceProblem problem = sum.problem;
  problem.x.data = data;
  problem.out = memory.result.address;
  problem.workspace = static_cast<float*>(memory.workspace.address);
  launcher().reduce(problem, stream);
}

PyRef take_gradient(ElementGradients& gradients, size_t k) {
  Memory& sum = gradients.sums[k].result;
  return std::move(sum.tensor ? sum.tensor : gradients.outputs[k].tensor);
}

}  // namespace cutfuse::call
