#include "reduce/program_plan.h"

#include <utility>

#include "epilogue/scaling.h"

namespace cutfuse {
namespace {

constexpr uintptr_t kAlignment = 16;
constexpr int kAnyMultiprocessors = 1;  // how work is shared out depends on them, and which kernel takes it does not

bool is_empty(ReduceExtents const& extents) { return extents.outer == 0 || extents.reduced == 0 || extents.inner == 0; }

// What the kernels of reduce_templates.cu count in 32 bits: results of rows, and of columns the threads across them and
// the rows. A tensor has fewer unless it takes 16 GB.
bool is_counted(PlannedReduce const& planned) {
  ReduceExtents const& extents = planned.layout.extents;
  if (planned.plan.path != ReducePath::kStrided) return extents.outer * extents.inner <= kMostCounted;
  return extents.outer * planned.plan.period <= kMostCounted && extents.reduced <= kMostCounted;
}

// The operands' dimensions follow the input's.
void turn(Operand& operand) { std::swap(operand.strides[0], operand.strides[2]); }

// How an operand lies along the line of a thread: its pieces follow each other along the reduced dimension, and a
// piece's elements too where rows are reduced.
specialize::OperandKind kind_on_line(Operand const& operand, ReducePath path) {
  using specialize::OperandKind;
  bool const is_same = operand.strides[1] == 0;
  bool const is_single = operand.strides[path == ReducePath::kStrided ? 2 : 1] == 0;
  if (is_same) return is_single ? OperandKind::kScalar : OperandKind::kRow;
  return is_single ? OperandKind::kColumn : OperandKind::kStrided;
}

bool is_aligned(void const* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

// Whether weighted_row_sum takes the operand: the same fp32 vector for every row, in step with rows of whole vectors.
bool is_row_weight(Operand const& operand, ReduceLayout const& layout, ReducePlan const& plan) {
  ReduceExtents const& extents = layout.extents;
  bool const same_for_rows = extents.outer == 1 || operand.strides[0] == 0;
  bool const aligned_rows = layout.aligned && (extents.outer == 1 || layout.strides[0] % plan.vector == 0);
  return plan.path == ReducePath::kRows && extents.inner == 1 && same_for_rows && aligned_rows &&
         operand.dtype == DType::kFloat32 && operand.strides[1] == 1 && is_aligned(operand.data);
}

// Takes a program that only scales out of a sum: a number to the end, an operand into the weighted kernel if it fits
// that.
void simplify(PlannedReduce& planned, int multiprocessors) {
  Scaling const scaling = find_scaling(planned.problem.program);
  if (!scaling.found || !is_additive(planned.problem.reduction)) return;
  ReduceLayout plain = planned.layout;
  plain.has_program = false;
  if (scaling.weight >= 0) {
    Operand const& weight = planned.problem.operands.items[scaling.weight];
    if (!is_row_weight(weight, plain, plan_reduce(plain, multiprocessors))) return;
    planned.weight = static_cast<float const*>(weight.data);
  }
  planned.scale = scaling.scale;
  planned.problem.program.length = 0;
  planned.layout = plain;
}

}  // namespace

PlannedReduce plan_program(ReduceProblem const& problem, int multiprocessors) {
  PlannedReduce planned = {};
  planned.problem = problem;
  planned.scale = 1.0f;
  int64_t const* const strides = problem.x.strides;
  planned.layout = normalize({problem.extents,
                              {strides[0], strides[1], strides[2]},
                              problem.x.dtype,
                              is_aligned(problem.x.data),
                              problem.program.length > 0});
  if (planned.layout.extents.inner != problem.extents.inner) {
    turn(planned.problem.x);
    for (Operand& operand : planned.problem.operands.items) turn(operand);
  }
  if (planned.layout.has_program) simplify(planned, multiprocessors);
  planned.plan = plan_reduce(planned.layout, multiprocessors);
  return planned;
}

std::string reduce_template(ReducePath path, DType dtype, Reduction reduction) {
  std::string const kernel = path == ReducePath::kStrided ? "strided_reduce_" : "row_reduce_";
  return kernel + name_of(first_of(info_of(reduction).fold)) + "_" + name_of(dtype);
}

std::string specialized_kernel(ReduceProblem const& problem) {
  if (is_empty(problem.extents) || problem.program.length == 0 || problem.reduction == Reduction::kNone) return {};
  PlannedReduce const planned = plan_program(problem, kAnyMultiprocessors);
  if (planned.problem.program.length == 0 || !planned.plan.whole_vectors || !is_counted(planned)) return {};
  return reduce_template(planned.plan.path, problem.x.dtype, problem.reduction);
}

specialize::OperandTypes specialized_operands(ReduceProblem const& problem) {
  specialize::OperandTypes types = {};
  if (is_empty(problem.extents)) return types;
  PlannedReduce const planned = plan_program(problem, kAnyMultiprocessors);
  for (int k = 0; k < problem.program.operand_count; ++k) {
    Operand const& operand = planned.problem.operands.items[k];
    types[k] = {operand.dtype, kind_on_line(operand, planned.plan.path)};
  }
  return types;
}

}  // namespace cutfuse
