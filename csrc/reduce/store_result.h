// Which row a group of threads of the row kernels reduces, and where a reduction kernel puts a finished state.
#pragma once

#include "common/vector_access.h"
#include "reduce/kernels.h"
#include "reduce/reductions.h"

namespace cutfuse {

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
