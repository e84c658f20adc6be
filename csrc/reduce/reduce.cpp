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

cudaError_t run_reduce(ReduceProblem const& problem, cudaStream_t stream) {
  ReduceExtents const& given = problem.extents;
  if (is_empty(given)) return cudaSuccess;
  int multiprocessors = 0;
  cudaError_t const query = multiprocessor_count(multiprocessors);
  if (query != cudaSuccess) return query;
  PlannedReduce const planned = plan_program(problem, problem.batch_invariant ? 0 : multiprocessors);
  int64_t const partial_rows = planned.plan.partial_rows;
  if (partial_rows > 0 && problem.workspace == nullptr) return cudaErrorInvalidValue;
  cudaError_t const status = launch_path(planned.problem, parameters_of(planned), stream);
  if (status != cudaSuccess || partial_rows == 0) return status;
  FoldProblem const fold = {problem.workspace, partial_rows, given.outer * given.inner, problem.reduction,
                            given.reduced,     problem.out,  problem.out_dtype,         problem.batch_invariant};
  return finalize_row_partials(fold, planned.scale, stream);
}

}  // namespace cutfuse
