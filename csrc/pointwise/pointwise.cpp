// Launches of programs and of their derivatives.
#include <vector>

#include "common/launch.h"
#include "pointwise/kernels.h"

namespace cutfuse {

namespace {

Output output_of(Operand const& operand) {
  return {const_cast<void*>(operand.data), {operand.strides[0], operand.strides[1], operand.strides[2]}, operand.dtype};
}

// The elements after the last vector of a folded row.
Operand tail_of(Operand const& operand, PointwisePlan const& plan) {
  int64_t const offset = (plan.extents.rows - 1) * operand.strides[1] + plan.last_columns * operand.strides[2];
  char const* const data =
      static_cast<char const*>(operand.data) + offset * static_cast<int64_t>(size_of(operand.dtype));
  return {data, {0, 0, operand.strides[2]}, operand.dtype};
}

PointwiseProblem tail_of(PointwiseParameters const& parameters) {
  PointwisePlan const& plan = parameters.plan;
  Output const& out = parameters.out;
  PointwiseProblem tail = {};
  tail.extents = {1, 1, plan.tail};
  tail.x = tail_of(parameters.x, plan);
  tail.program = parameters.program;
  for (int k = 0; k < tail.program.operand_count; ++k) {
    tail.operands.items[k] = tail_of(parameters.operands.items[k], plan);
  }
  Operand const rest = tail_of(Operand{out.data, {0, out.strides[1], out.strides[2]}, out.dtype}, plan);
  tail.out = const_cast<void*>(rest.data);
  tail.out_dtype = out.dtype;
  return tail;
}

template <class Parameters>
cudaError_t launch_specialized(LoadedKernel const& kernel, Parameters const& parameters, cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  return launch_loaded(kernel, block_count(plan), plan.width * plan.height, stream, parameters);
}

// The interpreter's start is worth eight rows.
constexpr PointwiseBlock kInterpretedBlock = {kVectorElements, kVectorThreads, 8};

cudaError_t launch_planned(PointwiseProblem const& problem, PointwiseParameters const& parameters,
                           cudaStream_t stream) {
  if (!parameters.plan.vectors) return launch_pointwise_lines(parameters, stream);
  if (problem.program.chain != kNoChain) return launch_pointwise_chain(parameters, stream);
  if (problem.specialized == nullptr) return launch_pointwise_vectors(parameters, stream);
  return launch_specialized(*problem.specialized, parameters, stream);
}

}  // namespace

PointwiseParameters parameters_of(PointwiseProblem const& problem, int multiprocessors) {
  PointwiseParameters parameters = {};
  parameters.program = problem.program;
  parameters.operands = problem.operands;
  std::vector<Operand> tensors = {problem.x, result_of(problem)};
  bool const is_chain = problem.program.chain != kNoChain;
  bool const is_compiled = is_chain || problem.specialized != nullptr;
  PointwiseBlock const block = is_compiled ? compiled_block(problem.x.dtype) : kInterpretedBlock;
  parameters.plan = plan_pointwise(problem.extents, tensors, strides_of(problem.program, parameters.operands), block,
                                   multiprocessors);
  parameters.x = tensors[0];
  parameters.out = output_of(tensors[1]);
  return parameters;
}

cudaError_t run_pointwise(PointwiseProblem const& problem, cudaStream_t stream) {
  if (is_empty(problem.extents)) return cudaSuccess;
  int multiprocessors = 0;
  cudaError_t const query = multiprocessor_count(multiprocessors);
  if (query != cudaSuccess) return query;
  PointwiseParameters const parameters = parameters_of(problem, multiprocessors);
  cudaError_t const status = launch_planned(problem, parameters, stream);
  if (status != cudaSuccess || parameters.plan.tail == 0) return status;
  return run_pointwise(tail_of(parameters), stream);
}

namespace {

// All but the plan and what it has rewritten.
PointwiseBackwardParameters begin_parameters(PointwiseBackwardProblem const& problem) {
  PointwiseExtents const& extents = problem.extents;
  PointwiseBackwardParameters parameters = {};
  parameters.grad = problem.grad;
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

void add_output(PointwiseBackwardParameters& parameters, WantedDerivative const& wanted, Operand const& planned) {
  int const w = parameters.derivative_count++;
  parameters.wrt[w] = wanted.wrt;
  parameters.outputs[w] = output_of(planned);
}

// What the kernel that interprets the derivatives is given.
PointwiseBackwardParameters interpreted_parameters_of(PointwiseBackwardProblem const& problem) {
  PointwiseBackwardParameters parameters = begin_parameters(problem);
  std::vector<WantedDerivative> const derivatives = derivatives_of(problem);
  std::vector<Operand> tensors = {problem.x};
  for (WantedDerivative const& wanted : derivatives) {
    tensors.push_back(contiguous(wanted.data, wanted.dtype, problem.extents));
  }
  StrideList others = strides_of(problem.program, parameters.operands);
  others.insert(others.end(), {parameters.grad.strides, parameters.row_result.strides, parameters.tie_count.strides});
  bool const keep_columns = problem.column_partials != nullptr;
  parameters.plan = plan_pointwise_backward(problem.extents, tensors, others, keep_columns);
  parameters.x = tensors[0];
  for (size_t w = 0; w < derivatives.size(); ++w) add_output(parameters, derivatives[w], tensors[w + 1]);
  return parameters;
}

}  // namespace

PointwiseBackwardParameters specialized_parameters_of(PointwiseBackwardProblem const& problem) {
  PointwiseBackwardParameters parameters = begin_parameters(problem);
  BackwardPlan const planned = specialized_backward_plan(problem);
  parameters.plan = planned.plan;
  parameters.operands = planned.operands;
  parameters.x = planned.tensors[0];
  parameters.grad = planned.tensors[1];
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
      return launch_specialized(*problem.specialized, parameters, stream);
    }
  }
  return launch_pointwise_backward(interpreted_parameters_of(problem), stream);
}

}  // namespace cutfuse
