#include "common/launch.h"
#include "reduce/kernels.h"
#include "reduce/reduce_plan.h"

namespace cutfuse {
namespace {

cudaError_t launch_program(ReduceProblem const& problem, ReduceParameters const& parameters, cudaStream_t stream) {
  ReduceProgramParameters const with_program = {parameters, problem.program, problem.operands};
  if (problem.specialized != nullptr && parameters.plan.whole_vectors) {
    return launch_loaded(*problem.specialized, block_count(parameters), threads_of(parameters.plan), stream,
                         with_program);
  }
  return parameters.plan.path == ReducePath::kStrided ? launch_strided_reduce_program(with_program, stream)
                                                      : launch_row_reduce_program(with_program, stream);
}

cudaError_t launch_path(ReduceProblem const& problem, ReduceParameters const& parameters, cudaStream_t stream) {
  if (problem.program.length > 0) return launch_program(problem, parameters, stream);
  if (parameters.weight != nullptr) return launch_weighted_row_sum(parameters, stream);
  switch (parameters.plan.path) {
    case ReducePath::kRows:
      return launch_row_reduce(parameters, stream);
    case ReducePath::kRowTiles:
      return launch_row_tile_reduce(parameters, stream);
    default:
      return launch_strided_reduce(parameters, stream);
  }
}

}  // namespace

ReduceParameters parameters_of(PlannedReduce const& planned) {
  ReduceParameters parameters = {};
  parameters.extents = planned.problem.extents;
  parameters.plan = planned.plan;
  parameters.x = planned.problem.x;
  parameters.reduction = planned.problem.reduction;
  parameters.out_dtype = planned.problem.out_dtype;
  parameters.out = planned.problem.out;
  if (planned.plan.partial_rows > 0) parameters.partials = planned.problem.workspace;
  parameters.scale = planned.scale;
  parameters.weight = planned.weight;
  return parameters;
}

int64_t block_count(ReduceParameters const& parameters) {
  ReduceExtents const& extents = parameters.extents;
  ReducePlan const& plan = parameters.plan;
  if (plan.path == ReducePath::kStrided) return ceil_divide(extents.outer * plan.period, plan.width) * plan.splits;
  return ceil_divide(extents.outer * extents.inner * plan.splits, kBlockThreads / plan.lanes);
}

int threads_of(ReducePlan const& plan) {
  return plan.path == ReducePath::kStrided ? plan.width * plan.height : kBlockThreads;
}

FoldProblem fold_of(ReduceProblem const& problem, PlannedReduce const& planned) {
  ReduceExtents const& given = problem.extents;
  bool const folds_rows = planned.plan.path == ReducePath::kFolded;
  float const* const partials = folds_rows ? static_cast<float const*>(problem.x.data) : problem.workspace;
  int64_t const tiles = folds_rows ? given.reduced : planned.plan.partial_rows;
  return {partials,      tiles,       given.outer * given.inner, problem.reduction,
          given.reduced, problem.out, problem.out_dtype,         problem.batch_invariant};
}

cudaError_t run_reduce(ReduceProblem const& problem, cudaStream_t stream) {
  if (is_empty(problem.extents)) return cudaSuccess;
  int multiprocessors = 0;
  cudaError_t const query = multiprocessor_count(multiprocessors);
  if (query != cudaSuccess) return query;
  PlannedReduce const planned = plan_program(problem, problem.batch_invariant ? 0 : multiprocessors);
  bool const has_partials = planned.plan.partial_rows > 0;
  if (has_partials && problem.workspace == nullptr) return cudaErrorInvalidValue;
  if (planned.plan.path != ReducePath::kFolded) {
    cudaError_t const status = launch_path(planned.problem, parameters_of(planned), stream);
    if (status != cudaSuccess || !has_partials) return status;
  }
  return finalize_row_partials(fold_of(problem, planned), planned.scale, stream);
}

}  // namespace cutfuse
