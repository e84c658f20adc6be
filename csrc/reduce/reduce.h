// Reductions of a tensor [outer, reduced, inner] to [outer, inner], with a program over every element first.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "reduce/reduce_problem.h"

namespace cutfuse {

// Accumulates in fp32. The result is the same from run to run on one kind of device.
cudaError_t run_reduce(ReduceProblem const& problem, cudaStream_t stream);

// Folds partial states [tiles, rows] (two floats each for logsumexp, one otherwise) to out [rows], times scale. `count`
// is how many elements a row's states cover together, which the mean divides by. early: starts while the kernel before
// it ends, which devices of sm_90 and later can.
cudaError_t finalize_row_partials(float const* partials, int64_t tiles, int64_t rows, Reduction reduction,
                                  int64_t count, float scale, void* out, DType out_dtype, bool early,
                                  cudaStream_t stream);

}  // namespace cutfuse
