// Which kernel of the table should run a problem: every row is either rejected with a reason or given a predicted time.
#pragma once

#include <string>
#include <vector>

#include "plan/gemm_configs.h"
#include "plan/predictions.h"

namespace cutfuse {

struct GemmCandidate {
  int config;             // row of gemm_configs()
  std::string rejection;  // empty for a kernel that can run
  double microseconds;    // predicted on an H200; 0 for a rejected kernel
  int swizzle;
  bool raster_along_m;
  int slices;     // of K; more than one only over planes
  bool computes;  // what is asked for; the rejection of one that does not says nothing about the problem
};

// Runnable kernels first, by predicted time; rejected ones after them.
std::vector<GemmCandidate> rank_gemm_configs(GemmProblem const& problem, OperandBytes operand_bytes = {});

}  // namespace cutfuse
