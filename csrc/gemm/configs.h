// The table of GEMM kernels, read from configs.def.
#pragma once

#include <string>
#include <vector>

#include "gemm/launch.h"
#include "gemm/problem.h"

namespace cutfuse {

enum class Schedule { kCooperative, kPingpong };

struct GemmConfig {
  char const* name;
  DType input;
  GemmOutput output;
  int tile_m;
  int tile_n;
  int tile_k;
  int cluster_m;
  int cluster_n;
  Schedule schedule;
  GemmLauncher launch;
};

std::vector<GemmConfig> const& gemm_configs();

// Why this kernel cannot take this problem, with the values; empty when it can. The one definition of validity.
std::string find_rejection(GemmConfig const& config, GemmProblem const& problem);

}  // namespace cutfuse
