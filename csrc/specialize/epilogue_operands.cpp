#include "specialize/epilogue_operands.h"

#include <string>
#include <variant>

#include "specialize/kernel_name.h"

namespace cutfuse::specialize {
namespace {

// Whether the copy engine takes the operand: in the result's type, in rows that begin on its boundaries.
bool can_be_fetched(GemmConfig const& config, Operand const& operand, int64_t columns) {
  int64_t const row_bytes = operand.strides[1] * static_cast<int64_t>(size_of(operand.dtype));
  bool const is_matrix = operand.strides[2] == 1 && operand.strides[1] >= columns;
  bool const is_aligned =
      row_bytes % kOperandAlignment == 0 && reinterpret_cast<uintptr_t>(operand.data) % kOperandAlignment == 0;
  return fetches_operand(config) && operand.dtype == config.input && is_matrix && is_aligned;
}

OperandKind kind_by_strides(Operand const& operand) {
  int64_t const row_stride = operand.strides[1];
  int64_t const column_stride = operand.strides[2];
  if (column_stride == 0) return row_stride == 0 ? OperandKind::kScalar : OperandKind::kColumn;
  return row_stride == 0 && column_stride == 1 ? OperandKind::kRow : OperandKind::kStrided;
}

}  // namespace

OperandTypes epilogue_operand_types(GemmConfig const& config, Program const& program, Operands const& operands,
                                    int64_t columns) {
  OperandTypes types = {};
  for (int k = 0; k < program.operand_count; ++k) {
    Operand const& operand = operands.items[k];
    types[k] = {operand.dtype, kind_by_strides(operand)};
    bool const is_first = source_among(types) < 0;
    if (is_first && can_be_fetched(config, operand, columns)) types[k].kind = OperandKind::kSource;
  }
  return types;
}

std::string epilogue_kernel(LinearPlan const& plan, FusedProduct const& product) {
  GemmConfig const& config = gemm_configs()[product.kernel.config];
  Reduction const reduction = config.output == GemmOutput::kRows ? plan.request.reduction : Reduction::kNone;
  return variant_kernel(config.name, {plan.request.stores_pre_activation, reduction});
}

std::vector<Specialization*> find_epilogues(LinearPlan const& plan, int device, Program const& program,
                                            Operands const& operands) {
  std::vector<Specialization*> found;
  if (!plan.request.specialized_cost) return found;
  Program const written = without_chain(program);  // the kernel has its chain as a function, which takes longer
  for (Launch const& launch : plan.launches) {
    auto const* const product = std::get_if<FusedProduct>(&launch);
    if (product == nullptr) continue;
    GemmConfig const& config = gemm_configs()[product->kernel.config];
    OperandTypes const types = epilogue_operand_types(config, program, operands, plan.request.weight.rows);
    found.push_back(find_specialization(epilogue_kernel(plan, *product), device, written, types));
    if (found.back() == nullptr) return {};
  }
  return found;
}

}  // namespace cutfuse::specialize
