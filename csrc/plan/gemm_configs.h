// The table of GEMM kernels, read from gemm_configs.def.
#pragma once

#include <string>
#include <vector>

#include "plan/gemm_problem.h"

namespace cutfuse {

// CUTLASS's; those of products over planes (see Product); and those of CUDA cores, by tiles in shared memory or, for
// few rows, by dot products of lines.
enum class Schedule { kCooperative, kPingpong, kSplit3, kSplit6, kConvert3, kConvert6, kFma, kDot };

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
  ProductLayout layout;
};

std::vector<GemmConfig> const& gemm_configs();

constexpr Product product_of(GemmConfig const& config) {
  switch (config.schedule) {
    case Schedule::kSplit3:
      return Product::kSplit3;
    case Schedule::kSplit6:
      return Product::kSplit6;
    case Schedule::kConvert3:
      return Product::kConvert3;
    case Schedule::kConvert6:
      return Product::kConvert6;
    case Schedule::kFma:
    case Schedule::kDot:
      return Product::kFma;
    default:
      return Product::kDirect;
  }
}

// Whether the copy engine can bring an operand of the epilogue, a matrix like the result, ahead of its use. In fp32 a
// cooperative kernel's main loop would lose a stage to its buffers.
constexpr bool fetches_operand(GemmConfig const& config) {
  if (config.output != GemmOutput::kSame || product_of(config) != Product::kDirect) return false;
  return config.input != DType::kFloat32 || config.schedule == Schedule::kPingpong;
}

// Whether a kernel computes what a problem asks for: by the operands' type, the product, what is written and how the
// weight lies. It may still not take the problem's sizes.
bool computes(GemmConfig const& config, GemmProblem const& problem);

// Why this kernel cannot take this problem, with the values; empty when it can. The one definition of validity.
std::string find_rejection(GemmConfig const& config, GemmProblem const& problem);

}  // namespace cutfuse
