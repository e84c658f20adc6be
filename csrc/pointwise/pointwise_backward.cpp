// Launches of the derivatives of programs.
#include <algorithm>
#include <vector>

#include "common/launch.h"
#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

// All but the plan and what it has rewritten.
PointwiseBackwardParameters begin_parameters(PointwiseBackwardProblem const& problem) {
  PointwiseExtents const& extents = problem.extents;
  PointwiseBackwardParameters parameters = {};
  parameters.grad = problem.grad;
  parameters.x = problem.x;
  parameters.program = problem.program;
  parameters.operands = problem.operands;
  parameters.column_partials = problem.column_partials;
  parameters.columns = extents.columns;
  parameters.reduction = problem.reduction;
  parameters.row_result = {problem.row_result, {extents.rows, 1, 0}, DType::kFloat32};
  parameters.tie_count = {problem.tie_count, {extents.rows, 1, 0}, DType::kFloat32};
  // A reduction's weights compare values with its result too.
  bool const compares = problem.is_accurate || problem.reduction != Reduction::kNone;
  parameters.is_accurate = compares || problem.x.dtype == DType::kFloat32;
  return parameters;
}

void add_output(PointwiseBackwardParameters& parameters, WantedDerivative const& wanted,
                PointwiseTensor const& planned) {
  int const w = parameters.derivative_count++;
  parameters.wrt[w] = wanted.wrt;
  parameters.outputs[w].data = wanted.data;
  parameters.outputs[w].dtype = wanted.dtype;
  std::copy_n(planned.strides, 3, parameters.outputs[w].strides);
}

}  // namespace

PointwiseBackwardParameters interpreted_parameters_of(PointwiseBackwardProblem const& problem) {
  PointwiseBackwardParameters parameters = begin_parameters(problem);
  std::vector<WantedDerivative> const derivatives = derivatives_of(problem);
  std::vector<PointwiseTensor> tensors = {tensor_of(problem.x)};
  for (WantedDerivative const& wanted : derivatives) {
    tensors.push_back(tensor_of(contiguous(wanted.data, wanted.dtype, problem.extents)));
  }
  StrideList others = {parameters.grad.strides, parameters.row_result.strides, parameters.tie_count.strides};
  for (int k = 0; k < problem.program.operand_count; ++k) others.push_back(parameters.operands.items[k].strides);
  bool const keep_columns = problem.column_partials != nullptr;
  parameters.plan = plan_pointwise_backward(problem.extents, tensors, others, keep_columns);
  std::copy_n(tensors[0].strides, 3, parameters.x.strides);
  for (size_t w = 0; w < derivatives.size(); ++w) add_output(parameters, derivatives[w], tensors[w + 1]);
  return parameters;
}

PointwiseBackwardParameters specialized_parameters_of(PointwiseBackwardProblem const& problem) {
  PointwiseBackwardParameters parameters = begin_parameters(problem);
  BackwardPlan const planned = specialized_backward_plan(problem);
  parameters.plan = planned.plan;
  parameters.operands = planned.operands;
  std::copy_n(planned.tensors[0].strides, 3, parameters.x.strides);
  std::copy_n(planned.tensors[1].strides, 3, parameters.grad.strides);
  for (size_t w = 0; w < planned.derivatives.size(); ++w) {
    add_output(parameters, planned.derivatives[w], planned.tensors[w + 2]);
  }
  return parameters;
}

cudaError_t run_pointwise_backward(PointwiseBackwardProblem const& problem, cudaStream_t stream) {
  if (is_empty(problem.extents)) return cudaSuccess;
  if (problem.specialized != nullptr && problem.reduction == Reduction::kNone) {
    PointwiseBackwardParameters const parameters = specialized_parameters_of(problem);
    if (parameters.plan.vectors) {
      return launch_pointwise_backward_specialized(*problem.specialized, parameters, stream);
    }
  }
  return launch_pointwise_backward(interpreted_parameters_of(problem), stream);
}

}  // namespace cutfuse
