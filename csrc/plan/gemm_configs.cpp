#include "plan/gemm_configs.h"

#include <algorithm>
#include <limits>

#include "common/division.h"
#include "plan/predictions.h"

namespace cutfuse {

std::vector<GemmConfig> const& gemm_configs() {
#define CUTFUSE_GEMM_CONFIG(name, input, output, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, layout) \
  {#name,     DType::input,          GemmOutput::output,      tile_m, tile_n, tile_k, cluster_m,                 \
   cluster_n, Schedule::k##schedule, ProductLayout::k##layout},
  static std::vector<GemmConfig> const configs = {
#include "plan/gemm_configs.def"
  };
#undef CUTFUSE_GEMM_CONFIG
  return configs;
}

namespace {

// The tensor memory accelerator reads rows that start at multiples of 16 bytes.
constexpr int64_t kCopyAlignment = 16;

// Rows and columns by which the last cluster's tiles may reach past the matrix: their coordinates are ints too.
constexpr int64_t kPastTheEnd = 1024;

std::string check_pitch(char const* which, int64_t elements, DType dtype) {
  int64_t const bytes = elements * static_cast<int64_t>(size_of(dtype));
  if (bytes % kCopyAlignment == 0) {
    return {};
  }
  return std::string(which) + " is " + std::to_string(elements) + " " + name_of(dtype) + " elements (" +
         std::to_string(bytes) + " bytes), not a multiple of " + std::to_string(kCopyAlignment) + " bytes";
}

// The copy engine stores no column behind the last one, but its rows begin at multiples of 16 bytes. A pre-activation
// is stored in whole vectors, without gaps.
std::string check_results(GemmConfig const& config, GemmProblem const& problem) {
  if (config.output == GemmOutput::kRows) {
    return problem.stores_pre_activation ? "stores no matrix, and so no pre-activation" : "";
  }
  if (config.output == GemmOutput::kJoined && problem.columns_divisor % config.tile_n != 0) {
    return "computes " + std::to_string(config.tile_n) +
           " columns of one weight at a time, and those of a weight have the divisor " +
           std::to_string(problem.columns_divisor);
  }
  std::string fault =
      check_pitch(problem.ldd > 0 ? "the row pitch of the result" : "N", pitch_of_result(problem), problem.output);
  if (!fault.empty() || !problem.stores_pre_activation) return fault;
  return check_pitch("N", problem.n, problem.input);
}

// Planes are laid out for the kernels; the result alone is the caller's.
std::string check_planes(GemmConfig const& config, GemmProblem const& problem) {
  bool const converts = converts_weight(problem.product);
  if (problem.k % kSplitBlock != 0 || problem.lda != problem.k || (!converts && problem.ldb != problem.k)) {
    return "planes need K to be a multiple of " + std::to_string(kSplitBlock) + " and rows without gaps, got K " +
           std::to_string(problem.k) + " and pitches " + std::to_string(problem.lda) + " and " +
           std::to_string(problem.ldb);
  }
  if (converts) {
    std::string const fault = check_pitch("the row pitch of weight", problem.ldb, problem.input);
    if (!fault.empty()) return fault;
  }
  return check_results(config, problem);
}

// Any sizes and pitches will do, as long as the tiles can be counted.
std::string check_tiles(GemmConfig const& config, GemmProblem const& problem) {
  int64_t const tiles = ceil_divide(problem.m, config.tile_m) * ceil_divide(problem.n, config.tile_n);
  if (tiles <= std::numeric_limits<int>::max()) return {};
  return "has a block for each tile, and cannot have " + std::to_string(tiles);
}

char const* name_of(Product product) {
  switch (product) {
    case Product::kSplit3:
      return " split3";
    case Product::kSplit6:
      return " split6";
    case Product::kConvert3:
      return " convert3";
    case Product::kConvert6:
      return " convert6";
    case Product::kFma:
      return " fma";
    default:
      return "";
  }
}

char const* lines_of(bool are_columns) { return are_columns ? "columns" : "rows"; }

// Pitches between the contiguous lines, which may have any length: behind their ends the copy engine brings zeros.
std::string check_lines(GemmProblem const& problem) {
  bool const columns_of_x = reads_columns_of_x(problem.layout);
  bool const columns_of_weight = reads_columns_of_weight(problem.layout);
  std::string fault =
      check_pitch(columns_of_x ? "the column pitch of x" : "the row pitch of x", problem.lda, problem.input);
  if (!fault.empty()) return fault;
  return check_pitch(columns_of_weight ? "the column pitch of weight" : "the row pitch of weight", problem.ldb,
                     problem.input);
}

GemmOutput output_of(GemmProblem const& problem) {
  if (problem.columns_divisor > 0) return GemmOutput::kJoined;
  if (problem.reduction != Reduction::kNone) {
    return GemmOutput::kRows;
  }
  return problem.output == problem.input ? GemmOutput::kSame : GemmOutput::kFloat32;
}

// Tiles that the scheduler keeps together for the L2. It pads the grid to whole groups, whose tiles outside of the
// result take as long as others: a grid of eight by something padded to sixteen takes twice as long, one of 64 by 1002
// padded to 1008 0.6% longer. In groups of two it reads x anew for every second column of tiles: 8192x128256x4096 in
// bf16 takes 12.5 ms at once, and 11.8 ms in eight parts whose groups are of eight (H200).
int swizzle_for(GemmConfig const& config, GemmProblem const& problem) {
  if (product_of(config) == Product::kFma) return 1;  // such a kernel walks along one dimension
  constexpr int kLargestSwizzle = 8;
  constexpr int64_t kLeastTilesOfOnePadded = 100;
  int64_t const clusters_m = ceil_divide(ceil_divide(problem.m, config.tile_m), config.cluster_m);
  int64_t const clusters_n = ceil_divide(ceil_divide(problem.n, config.tile_n), config.cluster_n);
  int64_t const clusters = clusters_m * clusters_n;
  auto const padding = [&](int64_t swizzle) {
    return ceil_divide(clusters_m, swizzle) * ceil_divide(clusters_n, swizzle) * swizzle * swizzle - clusters;
  };
  // Tiles of joined weights find theirs by their column.
  int64_t const most = problem.columns_divisor > 0 ? 0 : clusters / kLeastTilesOfOnePadded;
  int swizzle = kLargestSwizzle;
  while (swizzle > 1 && padding(swizzle) > most) {
    swizzle /= 2;
  }
  return swizzle;
}

// The shorter dimension first, so that the tiles in flight share the longer one's operand.
bool rasters_along_m(GemmProblem const& problem) { return problem.m < problem.n; }

// The schedule that takes planes of both operands.
Schedule over_planes(Schedule schedule) {
  switch (schedule) {
    case Schedule::kConvert3:
      return Schedule::kSplit3;
    case Schedule::kConvert6:
      return Schedule::kSplit6;
    default:
      return schedule;
  }
}

// Whether a kernel adds in the order that batch-invariant products of its kind have. Kernels of tensor cores multiply K
// in one order whatever their tiles are. Of row reductions, the columns of a tile are one partial state. On CUDA cores,
// tiles of 16 and 32 rows share out K to their warps alike, those of 64 rows and dot products each in another way.
bool has_invariant_order(GemmConfig const& config) {
  constexpr int kReducedColumns = 128;
  constexpr int kMostFmaRows = 32;
  if (config.output == GemmOutput::kRows) return config.tile_n == kReducedColumns;
  if (product_of(config) != Product::kFma) return true;
  return config.schedule == Schedule::kFma && config.tile_m <= kMostFmaRows;
}

// How many slices of K make the problem fastest: more than one only where all of them run at once. As many whether the
// weight comes as planes or is converted, because the bits of the result depend on them.
int slices_for(GemmConfig config, GemmProblem const& problem) {
  if (!is_over_planes(product_of(config)) || problem.batch_invariant) return 1;
  config.schedule = over_planes(config.schedule);
  constexpr int kMostSlices = 32;
  int64_t const tiles = ceil_divide(problem.m, config.tile_m) * ceil_divide(problem.n, config.tile_n);
  int64_t const most = std::min<int64_t>({kMostSlices, problem.multiprocessors / tiles, problem.k / kSplitBlock});
  int best = 1;
  for (int slices = 2; slices <= most; ++slices) {
    if (slices_fit(problem.k, slices) &&
        predict_microseconds(config, problem, slices) < predict_microseconds(config, problem, best)) {
      best = slices;
    }
  }
  return best;
}

}  // namespace

bool computes(GemmConfig const& config, GemmProblem const& problem) {
  return config.input == problem.input && product_of(config) == problem.product &&
         config.output == output_of(problem) && config.layout == problem.layout;
}

std::string find_rejection(GemmConfig const& config, GemmProblem const& problem) {
  if (config.input != problem.input) {
    return std::string("supports ") + name_of(config.input) + " operands, not " + name_of(problem.input);
  }
  if (product_of(config) != problem.product) {
    return "computes another kind of product";
  }
  if (config.output != output_of(problem)) {
    return "stores another kind of result";
  }
  if (config.layout != problem.layout) {
    return std::string("reads x by ") + lines_of(reads_columns_of_x(config.layout)) + " and the weight by " +
           lines_of(reads_columns_of_weight(config.layout));
  }
  if (config.output == GemmOutput::kFloat32 && problem.output != DType::kFloat32) {
    return std::string("stores float32, not ") + name_of(problem.output);
  }
  if (problem.batch_invariant && !has_invariant_order(config)) {
    return "adds in another order than the kernels that are batch-invariant";
  }
  constexpr int64_t kLargest = std::numeric_limits<int>::max() - kPastTheEnd;
  if (problem.m < 1 || problem.n < 1 || problem.k < 1 || problem.m > kLargest || problem.n > kLargest ||
      problem.k > kLargest) {
    return "M, N and K have to lie between 1 and " + std::to_string(kLargest);
  }
  if (problem.product == Product::kFma) {
    return check_tiles(config, problem);
  }
  if (is_over_planes(problem.product)) {
    return check_planes(config, problem);
  }
  bool const is_vector = (problem.m == 1 && !problem.batch_invariant) || problem.n == 1;
  if (problem.input == DType::kFloat32 && is_vector) {
    return "multiplies in tf32, whereas cuBLAS multiplies a single row or column at full precision";
  }
  std::string const fault = check_lines(problem);
  return fault.empty() ? check_results(config, problem) : fault;
}

std::string describe(GemmProblem const& problem) {
  auto const number = [](int64_t value) { return std::to_string(value); };
  return "M=" + number(problem.m) + " N=" + number(problem.n) + " K=" + number(problem.k) +
         " lda=" + number(problem.lda) + " ldb=" + number(problem.ldb) + " ldd=" + number(pitch_of_result(problem)) +
         " input=" + name_of(problem.input) + " output=" + name_of(problem.output) +
         " reduction=" + name_of(problem.reduction) + name_of(problem.product) +
         (reads_columns_of_x(problem.layout) ? " x by columns" : "") +
         (reads_columns_of_weight(problem.layout) ? " weight by columns" : "");
}

std::vector<GemmCandidate> rank_gemm_configs(GemmProblem const& problem, OperandBytes operand_bytes) {
  auto const& configs = gemm_configs();
  std::vector<GemmCandidate> candidates;
  candidates.reserve(configs.size());
  for (int index = 0; index < static_cast<int>(configs.size()); ++index) {
    GemmConfig const& config = configs[index];
    GemmCandidate candidate{
        index, find_rejection(config, problem), 0.0, swizzle_for(config, problem), rasters_along_m(problem),
        1,     computes(config, problem)};
    if (candidate.rejection.empty()) {
      candidate.slices = slices_for(config, problem);
      candidate.microseconds = predict_microseconds(config, problem, candidate.slices, operand_bytes);
    }
    candidates.push_back(candidate);
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](GemmCandidate const& x, GemmCandidate const& y) {
    if (x.rejection.empty() != y.rejection.empty()) {
      return x.rejection.empty();
    }
    return x.microseconds < y.microseconds;
  });
  return candidates;
}

}  // namespace cutfuse
