// Reductions of a tensor [outer, reduced, inner] to [outer, inner], with a program over every element first: the
// launchers, one per kernel file, and what their kernels share.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/vector_access.h"
#include "reduce/reduce_plan.h"
#include "reduce/reductions.h"

namespace cutfuse {

// Accumulates in fp32. The result is the same from run to run on one kind of device.
cudaError_t run_reduce(ReduceProblem const& problem, cudaStream_t stream);

cudaError_t finalize_row_partials(FoldProblem const& problem, float scale, cudaStream_t stream);

// What every reduction kernel is given. Partial states lie as [splits (times super-row), outer * inner].
struct ReduceParameters {
  ReduceExtents extents;
  ReducePlan plan;
  Operand x;
  Reduction reduction;
  DType out_dtype;
  void* out;
  float* partials;  // null: results are final
  float scale;      // of final results
  float const*
      weight;  // null, or [reduced] on a 16-byte boundary: elements count this many times in a sum of aligned rows
};

struct ReduceProgramParameters {
  ReduceParameters reduce;
  Program program;
  Operands operands;
};

// What the kernels of a planned problem are given.
ReduceParameters parameters_of(PlannedReduce const& planned);

// What is folded behind the kernel of a planned problem, or in its place.
FoldProblem fold_of(ReduceProblem const& problem, PlannedReduce const& planned);

// Of the row kernels and the strided ones.
int64_t block_count(ReduceParameters const& parameters);
int threads_of(ReducePlan const& plan);

cudaError_t launch_row_reduce(ReduceParameters const& parameters, cudaStream_t stream);
cudaError_t launch_weighted_row_sum(ReduceParameters const& parameters, cudaStream_t stream);
cudaError_t launch_row_tile_reduce(ReduceParameters const& parameters, cudaStream_t stream);
cudaError_t launch_strided_reduce(ReduceParameters const& parameters, cudaStream_t stream);
cudaError_t launch_row_reduce_program(ReduceProgramParameters const& parameters, cudaStream_t stream);
cudaError_t launch_strided_reduce_program(ReduceProgramParameters const& parameters, cudaStream_t stream);

// Which row a group of threads of the row kernels reduces, and where a reduction kernel puts a finished state.

#if defined(__CUDACC__)

struct RowTask {
  int64_t row;
  int64_t split;
  int lane;
};

__device__ __forceinline__ RowTask row_task(ReducePlan const& plan) {
  int const thread = static_cast<int>(threadIdx.x);
  int const shift = __popc(plan.lanes - 1);  // of a power of two
  int64_t const task = static_cast<int64_t>(blockIdx.x) * (static_cast<int>(blockDim.x) >> shift) + (thread >> shift);
  int64_t const row = plan.splits == 1 ? task : task / plan.splits;
  return {row, task - row * plan.splits, thread & (plan.lanes - 1)};
}

// partial_row: which of the result's partial states this is, where there are several.
__device__ __forceinline__ void store_result(ReduceParameters const& parameters, int64_t partial_row, int64_t index,
                                             RowState state) {
  if (parameters.partials == nullptr) {
    float const count = static_cast<float>(parameters.extents.reduced);
    float const result = finish_any(parameters.reduction, state, count);
    store_element(parameters.out, parameters.out_dtype, index, result * parameters.scale);
  } else {
    int64_t const results = parameters.extents.outer * parameters.extents.inner;
    store_partial_any(parameters.reduction, parameters.partials, partial_row * results + index, state);
  }
}

#endif

}  // namespace cutfuse
