// Which kernel of the table should run a problem: every row is either rejected with a reason or given a predicted time.
#pragma once

#include <string>
#include <vector>

#include "gemm/configs.h"

namespace cutfuse {

struct GemmCandidate {
  int config;             // row of gemm_configs()
  std::string rejection;  // empty for a kernel that can run
  double microseconds;    // predicted on an H200; 0 for a rejected kernel
  int swizzle;
  bool raster_along_m;
  int slices;       // of K; more than one only over planes
  bool is_of_kind;  // a rejection of another kind says nothing about the problem
};

// Runnable kernels first, by predicted time; rejected ones after them.
std::vector<GemmCandidate> rank_gemm_configs(GemmProblem const& problem);

// The alternative: cuBLAS, then one pointwise or reduction kernel over its result. A product over planes is compared
// with cuBLAS in fp32.
double predict_unfused_microseconds(GemmProblem const& problem);

// One pass that splits an fp32 matrix into planes.
double predict_split_microseconds(int64_t rows, int64_t columns);

}  // namespace cutfuse
