#include "pointwise/pointwise.h"

#include <algorithm>

#include "common/launch.h"
#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

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

}  // namespace cutfuse
