// The launchers behind run_reduce(): one per kernel file.
#pragma once

#include "reduce/program_plan.h"
#include "reduce/reduce.h"

namespace cutfuse {

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

// Of the row kernels and the strided ones.
int64_t block_count(ReduceParameters const& parameters);
int threads_of(ReducePlan const& plan);

cudaError_t launch_row_reduce(ReduceParameters const& parameters, cudaStream_t stream);
cudaError_t launch_weighted_row_sum(ReduceParameters const& parameters, cudaStream_t stream);
cudaError_t launch_row_tile_reduce(ReduceParameters const& parameters, cudaStream_t stream);
cudaError_t launch_strided_reduce(ReduceParameters const& parameters, cudaStream_t stream);
cudaError_t launch_row_reduce_program(ReduceProgramParameters const& parameters, cudaStream_t stream);
cudaError_t launch_strided_reduce_program(ReduceProgramParameters const& parameters, cudaStream_t stream);

}  // namespace cutfuse
