#include "pointwise/specialized_plan.h"

#include <algorithm>

#include "specialize/kernel_name.h"

namespace cutfuse {
namespace {

constexpr int64_t kVectorBytes = 16;

// Rows and columns are what the kernels of pointwise_templates.cu count in 32 bits. Columns are fewer unless two rows
// take 4 GB, and so are rows unless they take 16 GB and cannot be merged.
bool is_counted(PointwiseExtents const& extents) {
  return extents.rows <= kMostCounted && extents.columns <= kMostCounted;
}

}  // namespace

bool is_empty(PointwiseExtents const& extents) {
  return extents.outer == 0 || extents.rows == 0 || extents.columns == 0;
}

PointwiseTensor tensor_of(Operand const& operand) {
  return {{operand.strides[0], operand.strides[1], operand.strides[2]},
          operand.dtype,
          reinterpret_cast<uintptr_t>(operand.data)};
}

Operand contiguous(void const* data, DType dtype, PointwiseExtents const& extents) {
  return {data, {extents.rows * extents.columns, extents.columns, 1}, dtype};
}

PointwiseBlock compiled_block(DType dtype) {
  return {kChainVectors * static_cast<int>(kVectorBytes / static_cast<int64_t>(size_of(dtype))), kVectorThreads, 1};
}

std::string specialized_template(DType dtype) { return std::string("pointwise_") + name_of(dtype); }

std::string specialized_kernel(PointwiseProblem const& problem) {
  Program const& program = problem.program;
  PointwiseExtents const& extents = problem.extents;
  if (!is_interpreted(program) || is_empty(extents)) return {};
  Operands operands = problem.operands;
  StrideList others;
  for (int k = 0; k < program.operand_count; ++k) others.push_back(operands.items[k].strides);
  Operand const out = contiguous(problem.out, problem.out_dtype, extents);
  std::vector<PointwiseTensor> tensors = {tensor_of(problem.x), tensor_of(out)};
  // Rows of a block depend on the number of multiprocessors, and whether vectors are taken does not.
  constexpr int kMultiprocessors = 1;
  PointwisePlan const plan =
      plan_pointwise(extents, tensors, others, compiled_block(problem.x.dtype), kMultiprocessors);
  return plan.vectors && is_counted(plan.extents) ? specialized_template(problem.x.dtype) : std::string();
}

std::vector<WantedDerivative> derivatives_of(PointwiseBackwardProblem const& problem) {
  std::vector<WantedDerivative> derivatives(problem.derivatives, problem.derivatives + problem.derivative_count);
  bool const has_x = std::any_of(derivatives.begin(), derivatives.end(),
                                 [](WantedDerivative const& wanted) { return wanted.wrt == 0; });
  if (problem.column_partials != nullptr && !has_x) derivatives.push_back({0, nullptr, DType::kFloat32});
  return derivatives;
}

BackwardPlan specialized_backward_plan(PointwiseBackwardProblem const& problem) {
  BackwardPlan result = {
      {}, derivatives_of(problem), {tensor_of(problem.x), tensor_of(problem.grad)}, problem.operands};
  std::sort(result.derivatives.begin(), result.derivatives.end(),
            [](WantedDerivative const& a, WantedDerivative const& b) { return a.wrt < b.wrt; });
  for (WantedDerivative const& wanted : result.derivatives) {
    result.tensors.push_back(tensor_of(contiguous(wanted.data, wanted.dtype, problem.extents)));
  }
  StrideList others;
  for (int k = 0; k < problem.program.operand_count; ++k) others.push_back(result.operands.items[k].strides);
  result.plan = plan_backward_vectors(problem.extents, result.tensors, others, compiled_block(problem.x.dtype),
                                      problem.column_partials != nullptr);
  return result;
}

std::string specialized_kernel(PointwiseBackwardProblem const& problem) {
  bool const is_taken = problem.program.length > 0 && problem.reduction == Reduction::kNone &&
                        !is_empty(problem.extents) && !derivatives_of(problem).empty();
  if (!is_taken) return {};
  BackwardPlan const planned = specialized_backward_plan(problem);
  if (!planned.plan.vectors) return {};
  specialize::Inputs wrt;
  for (WantedDerivative const& wanted : planned.derivatives) wrt.push_back(wanted.wrt);
  std::string const kind = problem.column_partials != nullptr ? "pointwise_backward_columns_" : "pointwise_backward_";
  return specialize::derivative_kernel(kind + name_of(problem.x.dtype), wrt);
}

}  // namespace cutfuse
