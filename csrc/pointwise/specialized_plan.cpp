#include "pointwise/specialized_plan.h"

namespace cutfuse {
namespace {

constexpr int64_t kVectorBytes = 16;

bool is_empty(PointwiseExtents const& extents) {
  return extents.outer == 0 || extents.rows == 0 || extents.columns == 0;
}

PointwiseTensor tensor_of(Operand const& operand) {
  return {{operand.strides[0], operand.strides[1], operand.strides[2]},
          operand.dtype,
          reinterpret_cast<uintptr_t>(operand.data)};
}

}  // namespace

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
  Operand const out = {problem.out, {extents.rows * extents.columns, extents.columns, 1}, problem.out_dtype};
  std::vector<PointwiseTensor> tensors = {tensor_of(problem.x), tensor_of(out)};
  // Rows of a block depend on the number of multiprocessors, and whether vectors are taken does not.
  constexpr int kMultiprocessors = 1;
  PointwisePlan const plan =
      plan_pointwise(extents, tensors, others, compiled_block(problem.x.dtype), kMultiprocessors);
  return plan.vectors ? specialized_template(problem.x.dtype) : std::string();
}

}  // namespace cutfuse
