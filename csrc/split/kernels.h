// The launchers behind run_split(): one per kernel file.
#pragma once

#include <cuda_runtime.h>

#include "split/planes_shape.h"
#include "split/split.h"

namespace cutfuse {

// Positions fit 32 bits, which leaves the kernels registers for more loads in flight; offsets do not.
struct SplitParameters {
  float const* source;
  int64_t row_stride;
  int64_t column_stride;
  int64_t plane_stride;  // elements from a part's to the next's
  int64_t block_stride;  // and from a block of columns to the next
  Planes planes;
  ClearedWords cleared;
  SplitGuard only_if;
  int32_t rows;
  int32_t columns;
  int32_t pitch;
  int32_t scale_pitch;
  int32_t row_tiles;
  int32_t column_tiles;
  int32_t width_shift;
  int32_t blocks;
  SplitPlan plan;
  bool shares_scales;  // kSharedScaleRows rows each
  bool guarded;
};

// Contiguous rows, of any stride and alignment.
cudaError_t launch_split_rows(SplitParameters const& parameters, cudaStream_t stream);
// Any strides; fast where rows are neighbours in memory.
cudaError_t launch_split_transposed(SplitParameters const& parameters, cudaStream_t stream);

}  // namespace cutfuse
