// What a fused GEMM is asked to do: y[M,N] = program(a[M,K] @ b[N,K]^T + bias[N], operands), or its rows reduced; the
// table of the kernels that do so, read from gemm_configs.def; and which of them should run a problem. Host code that
// knows no CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "plan/device_times.h"
#include "reduce/reductions.h"
#include "split/planes.h"

namespace cutfuse {

// How the operands are multiplied: on tensor cores as they are (kPlain; fp32 as tf32) or as planes of 16-bit parts
// (see split/planes.h), or by fused multiply-adds in fp32 (kFma). kConvert3 and kConvert6 take the planes of a alone,
// and split b, in fp32, on its way in.
enum class Product : int32_t { kPlain = 0, kFma = 1, kSplit3 = 3, kSplit6 = 6, kConvert3 = 13, kConvert6 = 16 };

constexpr bool is_over_planes(Product product) { return product != Product::kPlain && product != Product::kFma; }

constexpr bool converts_weight(Product product) {
  return product == Product::kConvert3 || product == Product::kConvert6;
}

// Which lines of x [M, K] and the weight [N, K] are contiguous: the rows of both (kNT), x's rows and the weight's
// columns (kNN), as x @ w has them for a contiguous w [K, N], or the columns of both (kTN), as the gradient of a
// weight, grad.T @ x, has them. The letters are BLAS's, of x and the weight in memory.
enum class ProductLayout { kNT, kNN, kTN };

constexpr bool reads_columns_of_x(ProductLayout layout) { return layout == ProductLayout::kTN; }
constexpr bool reads_columns_of_weight(ProductLayout layout) { return layout != ProductLayout::kNT; }

// What a row of the table writes: the matrix in the operands' own type, the matrix in fp32, or row partials; or in the
// operands' own type the products of one a with several weights, side by side.
enum class GemmOutput { kSame, kFloat32, kRows, kJoined };

// Everything that the choice of a kernel depends on, and no pointer to a device's memory.
struct GemmProblem {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t lda;          // elements between rows of a, or between its columns where these are contiguous: see layout
  int64_t ldb;          // the same of b
  DType input;          // of a, b and bias
  DType output;         // of the stored matrix; partials of a row reduction are always fp32
  Reduction reduction;  // kNone stores the matrix, anything else one partial state per row and N tile
  int32_t multiprocessors;
  float epilogue_cost;  // see cost_of(Program) and specialized_cost_of(Program)
  Product product;
  bool specializes;            // the kernel has the epilogue compiled in, as soon as it is
  bool stores_pre_activation;  // beside the result, in the operands' type: z = a @ b^T + bias
  ProductLayout layout = ProductLayout::kNT;
  // Of several weights whose products lie side by side in y: what divides the columns of each. 0 for one weight.
  int64_t columns_divisor = 0;
  bool batch_invariant = false;        // see LinearRequest
  int64_t ldd = 0;                     // elements between rows of the stored matrix; 0 for rows without gaps
  DeviceTimes const* times = nullptr;  // by which it is predicted; null for the first of device_times()
};

constexpr int64_t pitch_of_result(GemmProblem const& problem) { return problem.ldd > 0 ? problem.ldd : problem.n; }

// When a kernel over planes runs: always, or if the guard leaves split3 or trips it. Otherwise it returns at once.
enum class SplitRun : int32_t { kAlways, kIfClear, kIfTripped };

// Whether every one of a number of slices has a step of K.
constexpr bool slices_fit(int64_t k, int slices) {
  int64_t const steps = k / kSplitBlock;
  return slices >= 1 && slices <= steps && (steps + slices - 1) / slices * (slices - 1) < steps;
}

std::string describe(GemmProblem const& problem);

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
      return Product::kPlain;
  }
}

// Whether the copy engine can bring an operand of the epilogue, a matrix like the result, ahead of its use. In fp32 a
// cooperative kernel's main loop would lose a stage to its buffers.
constexpr bool fetches_operand(GemmConfig const& config) {
  if (config.output != GemmOutput::kSame || product_of(config) != Product::kPlain) return false;
  return config.input != DType::kFloat32 || config.schedule == Schedule::kPingpong;
}

// Whether a kernel computes what a problem asks for: by the operands' type, the product, what is written and how the
// weight lies. It may still not take the problem's sizes.
bool computes(GemmConfig const& config, GemmProblem const& problem);

// Why this kernel cannot take this problem, with the values; empty when it can. The one definition of validity.
std::string find_rejection(GemmConfig const& config, GemmProblem const& problem);

// What an epilogue reads for each element of the result: see LinearRequest.
struct OperandBytes {
  float all = 0.0f;
  float fetched = 0.0f;
};

// Every row of the table is either rejected with a reason or given a predicted time.
struct GemmCandidate {
  int config;             // row of gemm_configs()
  std::string rejection;  // empty for a kernel that can run
  double microseconds;    // predicted on an H200; 0 for a rejected kernel
  int swizzle;
  bool raster_along_m;
  int slices;     // of K; more than one only over planes
  bool computes;  // what is asked for; the rejection of one that does not says nothing about the problem
};

inline GemmConfig const& config_of(GemmCandidate const& candidate) { return gemm_configs()[candidate.config]; }

// Runnable kernels first, by predicted time; rejected ones after them.
std::vector<GemmCandidate> rank_gemm_configs(GemmProblem const& problem, OperandBytes operand_bytes = {});

}  // namespace cutfuse
