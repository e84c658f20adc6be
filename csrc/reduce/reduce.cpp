#include "reduce/reduce.h"

#include <utility>

#include "common/launch.h"
#include "epilogue/scaling.h"
#include "reduce/kernels.h"
#include "reduce/reductions.h"

namespace cutfuse {
namespace {

constexpr uintptr_t kAlignment = 16;

// The operands' dimensions follow the input's.
void turn(Operand& operand) { std::swap(operand.strides[0], operand.strides[2]); }

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
void simplify(ReduceProblem& problem, ReduceLayout& layout, ReduceParameters& parameters, int multiprocessors) {
  Scaling const scaling = find_scaling(problem.program);
  if (!scaling.found || !is_additive(problem.reduction)) return;
  ReduceLayout plain = layout;
  plain.has_program = false;
  if (scaling.weight >= 0) {
    Operand const& weight = problem.operands.items[scaling.weight];
    if (!is_row_weight(weight, plain, plan_reduce(plain, multiprocessors))) return;
    parameters.weight = static_cast<float const*>(weight.data);
  }
  parameters.scale = scaling.scale;
  problem.program.length = 0;
  layout = plain;
}

cudaError_t launch_path(ReduceProblem const& problem, ReduceParameters const& parameters, cudaStream_t stream) {
  ReducePath const path = parameters.plan.path;
  if (problem.program.length > 0) {
    ReduceProgramParameters const with_program = {parameters, problem.program, problem.operands};
    return path == ReducePath::kStrided ? launch_strided_reduce_program(with_program, stream)
                                        : launch_row_reduce_program(with_program, stream);
  }
  if (parameters.weight != nullptr) return launch_weighted_row_sum(parameters, stream);
  switch (path) {
    case ReducePath::kRows:
      return launch_row_reduce(parameters, stream);
    case ReducePath::kRowTiles:
      return launch_row_tile_reduce(parameters, stream);
    default:
      return launch_strided_reduce(parameters, stream);
  }
}

}  // namespace

cudaError_t run_reduce(ReduceProblem const& original, cudaStream_t stream) {
  ReduceExtents const& given = original.extents;
  if (given.outer == 0 || given.inner == 0 || given.reduced == 0) return cudaSuccess;
  int multiprocessors = 0;
  cudaError_t const query = multiprocessor_count(multiprocessors);
  if (query != cudaSuccess) return query;

  ReduceProblem problem = original;
  int64_t const* const strides = original.x.strides;
  ReduceLayout layout = normalize({given,
                                   {strides[0], strides[1], strides[2]},
                                   original.x.dtype,
                                   is_aligned(original.x.data),
                                   original.program.length > 0});
  if (layout.extents.inner != given.inner) {
    turn(problem.x);
    for (Operand& operand : problem.operands.items) turn(operand);
  }
  ReduceParameters parameters = {};
  parameters.scale = 1.0f;
  if (layout.has_program) simplify(problem, layout, parameters, multiprocessors);
  parameters.extents = layout.extents;
  parameters.plan = plan_reduce(layout, multiprocessors);
  parameters.x = problem.x;
  parameters.reduction = problem.reduction;
  parameters.out_dtype = problem.out_dtype;
  parameters.out = problem.out;
  int64_t const partial_rows = parameters.plan.partial_rows;
  if (partial_rows > 0) parameters.partials = problem.workspace;
  if (partial_rows > 0 && problem.workspace == nullptr) return cudaErrorInvalidValue;
  cudaError_t const status = launch_path(problem, parameters, stream);
  if (status != cudaSuccess || partial_rows == 0) return status;
  return finalize_row_partials(problem.workspace, partial_rows, given.outer * given.inner, problem.reduction,
                               given.reduced, parameters.scale, problem.out, problem.out_dtype, stream);
}

}  // namespace cutfuse
