#include "pointwise/pointwise.h"

#include <algorithm>

#include "common/launch.h"
#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

PointwiseTensor tensor_of(Operand const& operand) {
  return {{operand.strides[0], operand.strides[1], operand.strides[2]},
          operand.dtype,
          reinterpret_cast<uintptr_t>(operand.data)};
}

Operand contiguous(void const* data, DType dtype, PointwiseExtents const& extents) {
  return {data, {extents.rows * extents.columns, extents.columns, 1}, dtype};
}

Output output_of(Operand const& operand) {
  return {const_cast<void*>(operand.data), {operand.strides[0], operand.strides[1], operand.strides[2]}, operand.dtype};
}

// Puts the strides that the plan has rewritten back into the tensor.
void take_strides(Operand& operand, PointwiseTensor const& planned) {
  std::copy_n(planned.strides, 3, operand.strides);
}

StrideList strides_of(Program const& program, Operands& operands) {
  StrideList strides;
  for (int k = 0; k < program.operand_count; ++k) strides.push_back(operands.items[k].strides);
  return strides;
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

bool is_empty(PointwiseExtents const& extents) {
  return extents.outer == 0 || extents.rows == 0 || extents.columns == 0;
}

// Column sums are of the derivative with respect to x, which has to be computed for them even where nobody wants it
// stored.
std::vector<WantedDerivative> derivatives_of(PointwiseBackwardProblem const& problem) {
  std::vector<WantedDerivative> derivatives(problem.derivatives, problem.derivatives + problem.derivative_count);
  bool const has_x = std::any_of(derivatives.begin(), derivatives.end(),
                                 [](WantedDerivative const& wanted) { return wanted.wrt == 0; });
  if (problem.column_partials != nullptr && !has_x) derivatives.push_back({0, nullptr, DType::kFloat32});
  return derivatives;
}

// The interpreter's start is worth eight rows.
constexpr PointwiseBlock kInterpretedBlock = {kVectorElements, kVectorThreads, 8};

cudaError_t launch_planned(PointwiseProblem const& problem, PointwiseParameters const& parameters,
                           cudaStream_t stream) {
  if (!parameters.plan.vectors) return launch_pointwise_lines(parameters, stream);
  if (problem.program.chain != kNoChain) return launch_pointwise_chain(parameters, stream);
  if (problem.specialized == nullptr) return launch_pointwise_vectors(parameters, stream);
  return launch_pointwise_specialized(*problem.specialized, parameters, stream);
}

}  // namespace

PointwiseParameters parameters_of(PointwiseProblem const& problem, int multiprocessors) {
  PointwiseParameters parameters = {};
  parameters.x = problem.x;
  parameters.program = problem.program;
  parameters.operands = problem.operands;
  Operand out = contiguous(problem.out, problem.out_dtype, problem.extents);
  std::vector<PointwiseTensor> tensors = {tensor_of(problem.x), tensor_of(out)};
  bool const is_chain = problem.program.chain != kNoChain;
  bool const is_compiled = is_chain || problem.specialized != nullptr;
  PointwiseBlock const block = is_compiled ? compiled_block(problem.x.dtype) : kInterpretedBlock;
  parameters.plan = plan_pointwise(problem.extents, tensors, strides_of(problem.program, parameters.operands), block,
                                   multiprocessors);
  take_strides(parameters.x, tensors[0]);
  take_strides(out, tensors[1]);
  parameters.out = output_of(out);
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

cudaError_t run_pointwise_backward(PointwiseBackwardProblem const& problem, cudaStream_t stream) {
  PointwiseExtents const& extents = problem.extents;
  if (is_empty(extents)) return cudaSuccess;
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

  std::vector<WantedDerivative> const derivatives = derivatives_of(problem);
  std::vector<PointwiseTensor> tensors = {tensor_of(problem.x)};
  for (WantedDerivative const& wanted : derivatives) {
    tensors.push_back(tensor_of(contiguous(wanted.data, wanted.dtype, extents)));
  }
  StrideList others = strides_of(problem.program, parameters.operands);
  for (Operand* operand : {&parameters.grad, &parameters.row_result, &parameters.tie_count}) {
    others.push_back(operand->strides);
  }
  bool const keep_columns = problem.column_partials != nullptr;
  parameters.plan = plan_pointwise_backward(extents, tensors, others, keep_columns);
  take_strides(parameters.x, tensors[0]);
  for (WantedDerivative const& wanted : derivatives) {
    int const w = parameters.derivative_count++;
    parameters.wrt[w] = wanted.wrt;
    Output& output = parameters.outputs[w];
    output.data = wanted.data;
    output.dtype = wanted.dtype;
    std::copy_n(tensors[w + 1].strides, 3, output.strides);
  }
  return launch_pointwise_backward(parameters, stream);
}

}  // namespace cutfuse
