// Splits an fp32 matrix into planes of 16-bit parts: see planes.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {

struct SplitProblem {
  float const* source;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride;
  SplitPlan plan;
  bool is_weight;  // a product's second operand
  Planes planes;
  ClearedWords cleared;
  SplitGuard only_if;
  bool guarded;  // every block returns at once unless only_if trips; starts early (see common/early_launch.h)
};

// One read of the source, one write of the planes.
cudaError_t run_split(SplitProblem const& problem, cudaStream_t stream);

}  // namespace cutfuse
