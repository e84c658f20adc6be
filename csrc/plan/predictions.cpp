#include "plan/predictions.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "common/ceil_divide.h"

namespace cutfuse {

namespace {

// Times of one kernel on an H200 in microseconds, fitted to 94 bf16 problems of M 16 to 8192, N and K 1024 to 32768
// (mean error 7%, 13% for the small tiles). A wave is one tile on every multiprocessor; a pingpong kernel's epilogue
// hides behind the other warpgroup's product. tf32 takes twice as long for the same K. Over planes: 54
// problems of M 32 to 4096 (mean error 3%).
struct TileTiming {
  int tile_m;
  int tile_n;
  Schedule schedule;
  double start;
  double per_wave;
  double per_wave_of_1024_k;
};

constexpr TileTiming kTimings[] = {
    {128, 256, Schedule::kCooperative, 3.4, 6.3, 10.2}, {128, 128, Schedule::kCooperative, 5.5, 3.0, 5.75},
    {128, 128, Schedule::kPingpong, 8.4, 0.75, 5.65},   {64, 128, Schedule::kPingpong, 5.4, 1.2, 4.35},
    {64, 64, Schedule::kPingpong, 6.7, 0.2, 3.3},       {128, 128, Schedule::kSplit3, 7.0, 2.6, 16.9},
    {128, 128, Schedule::kSplit6, 7.0, 2.5, 29.8},      {128, 128, Schedule::kConvert3, 7.0, 3.7, 23.2},
    {128, 128, Schedule::kConvert6, 4.6, 5.8, 41.4},
};
constexpr double kTf32Factor = 2.05;
// Interpreting an op of cost 1 over 128x128 elements: eight warps share a cooperative tile, and a
// pingpong kernel's warpgroups take turns.
constexpr double kCooperativeOp = 1.1;
constexpr double kPingpongOp = 2.65;
// The small kernel after a row reduction, and what a wave spends on its partial states.
constexpr double kFinalize = 4.0;
constexpr double kRowsPerWave = 2.0;
// Waiting for the last of K's slices, and one block's adding of a slice's sums.
constexpr double kFirstSlice = 3.0;
constexpr double kPerSlice = 0.8;
constexpr double kBytesPerMicrosecond = 4.0e6;
constexpr double kBytesPerMicrosecondAndMultiprocessor = 45e3;

TileTiming const& timing_of(GemmConfig const& config) {
  for (TileTiming const& timing : kTimings) {
    if (timing.tile_m == config.tile_m && timing.tile_n == config.tile_n && timing.schedule == config.schedule) {
      return timing;
    }
  }
  throw std::logic_error(std::string(config.name) + " has no row in kTimings: measure its tile and add one");
}

// cuBLAS in fp32, on CUDA cores: within 25% of 100 problems of M 1 to 8192, N and K 1024 to 8192 on an H200, but for up
// to 16 rows and N 1024, where it takes up to twice as long. For few rows it has kernels of their own.
double predict_ieee_microseconds(GemmProblem const& problem) {
  constexpr double kStart = 12.0;
  double const m = static_cast<double>(problem.m);
  double const n = static_cast<double>(problem.n);
  double const k = static_cast<double>(problem.k);
  bool const is_skinny = problem.m <= 16 || (problem.m <= 32 && problem.n < 8192);
  double const bytes_per_microsecond = problem.m <= 4 ? 2.9e6 : (is_skinny ? 2.0e6 : 1.35e6);
  double const start = problem.m <= 4 || (problem.m <= 32 && !is_skinny) ? kStart / 2 : kStart;
  double const bytes = 4.0 * (m * k + n * k + m * n);
  double const operations = 2.0 * m * n * k;
  double const operations_per_microsecond = operations < 2.5e9 ? 40e6 : 48e6;
  return start + std::max(operations / operations_per_microsecond, bytes / bytes_per_microsecond);
}

double predict_product_microseconds(GemmProblem const& problem) {
  GemmProblem product = problem;
  product.reduction = Reduction::kNone;
  product.output = problem.input;
  product.epilogue_cost = 0.0f;
  double best = std::numeric_limits<double>::infinity();
  for (GemmConfig const& config : gemm_configs()) {
    if (computes(config, product)) {
      best = std::min(best, predict_microseconds(config, product, 1));
    }
  }
  // cuBLAS has more tiles to choose from, and splits K: a sixth of a small product, a few microseconds of a large one.
  return best - std::min(best / 6.0, 4.3);
}

}  // namespace

double predict_microseconds(GemmConfig const& config, GemmProblem const& problem, int slices) {
  TileTiming const& timing = timing_of(config);
  int64_t const tiles_m = ceil_divide(ceil_divide(problem.m, config.tile_m), config.cluster_m) * config.cluster_m;
  int64_t const tiles_n = ceil_divide(ceil_divide(problem.n, config.tile_n), config.cluster_n) * config.cluster_n;
  int64_t const multiprocessors = std::max(problem.multiprocessors, 1);
  double const waves = static_cast<double>(ceil_divide(tiles_m * tiles_n * slices, multiprocessors));
  bool const reduces = problem.reduction != Reduction::kNone;

  double const k = static_cast<double>(problem.k);
  double const k_of_wave =
      slices == 1 ? k : static_cast<double>(ceil_divide(problem.k / kSplitBlock, slices) * kSplitBlock);
  double const element_bytes = static_cast<double>(size_of(problem.input));
  bool const as_tf32 = problem.input == DType::kFloat32 && problem.product == Product::kDirect;
  double main_loop = timing.per_wave_of_1024_k * k_of_wave / 1024.0 * (as_tf32 ? kTf32Factor : 1.0);
  if (tiles_m == 1) {  // nobody shares a tile's columns of weight: they come at the rate of one multiprocessor
    main_loop = std::max(main_loop, config.tile_n * k_of_wave * element_bytes / kBytesPerMicrosecondAndMultiprocessor);
  }
  double const wave = main_loop + timing.per_wave + (reduces ? kRowsPerWave : 0.0);
  double const area = config.tile_m * config.tile_n / (128.0 * 128.0);
  bool const pingpong = config.schedule == Schedule::kPingpong;
  double const epilogue = problem.epilogue_cost * area * (pingpong ? kPingpongOp : kCooperativeOp);
  double const compute = pingpong ? waves * std::max(wave, epilogue) + epilogue : waves * (wave + epilogue);

  double const output_bytes = reduces ? 0.0 : static_cast<double>(size_of(problem.output)) * problem.m * problem.n;
  double const memory = (element_bytes * (problem.m + problem.n) * k + output_bytes) / kBytesPerMicrosecond;
  double const gathering = slices == 1 ? 0.0 : kFirstSlice + slices * kPerSlice;
  return timing.start + (reduces ? kFinalize : 0.0) + gathering + std::max(compute, memory);
}

double predict_split_microseconds(int64_t rows, int64_t columns) {
  constexpr double kLaunch = 2.5;
  return kLaunch + 8.0 * static_cast<double>(rows) * static_cast<double>(columns) / kBytesPerMicrosecond;
}

double predict_unfused_microseconds(GemmProblem const& problem) {
  double const product =
      problem.product == Product::kDirect ? predict_product_microseconds(problem) : predict_ieee_microseconds(problem);
  bool const is_bare = problem.epilogue_cost == 0.0f && problem.reduction == Reduction::kNone;
  if (is_bare && problem.product != Product::kDirect) return product;
  constexpr double kSecondLaunch = 3.5;
  constexpr double kMicrosecondsPerElementAndOp = 0.45e-6;
  double const elements = static_cast<double>(problem.m) * problem.n;
  double const passes = problem.reduction == Reduction::kNone ? 2.0 : 1.0;
  double const memory = passes * elements * static_cast<double>(size_of(problem.input)) / kBytesPerMicrosecond;
  double const interpretation = std::max(problem.epilogue_cost - 1.0f, 0.0f) * elements * kMicrosecondsPerElementAndOp;
  return product + kSecondLaunch + std::max(memory, interpretation);
}

}  // namespace cutfuse
