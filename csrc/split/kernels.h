// The launchers behind run_split(): one per kernel file.
#pragma once

#include <cuda_runtime.h>

#include "split/planes_shape.h"
#include "split/split.h"

namespace cutfuse {

// Row and column numbers are 32-bit, which saves registers for more loads in flight. Offsets need 64 bits.
struct SplitParameters {
  float const* source;
  int64_t row_stride;
  int64_t column_stride;
  int64_t plane_stride;  // elements between an element's parts in neighbouring planes
  int64_t block_stride;  // elements between neighbouring blocks of columns
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
  SplitScheme scheme;
  bool shares_scales;  // groups of kSharedScaleRows rows have one scale
  bool guarded;
};

// Takes rows that are contiguous, with any row stride and alignment.
cudaError_t launch_split_rows(SplitParameters const& parameters, cudaStream_t stream);
// Takes any strides. Reads are coalesced where neighbouring rows are adjacent in memory, as in a transposed matrix.
cudaError_t launch_split_transposed(SplitParameters const& parameters, cudaStream_t stream);

}  // namespace cutfuse
