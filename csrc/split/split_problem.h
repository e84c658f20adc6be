// The arguments of run_split(). Host code without CUDA.
#pragma once

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {

struct SplitProblem {
  float const* source;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride;
  SplitScheme scheme;
  bool is_weight;  // the matrix is a product's second operand
  Planes planes;
  ClearedWords cleared;
  SplitGuard only_if;
  bool guarded;  // thread blocks return at once unless only_if trips; launched early, see common/early_launch.h
};

}  // namespace cutfuse
