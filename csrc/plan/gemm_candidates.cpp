#include "plan/gemm_candidates.h"

#include <algorithm>

#include "common/ceil_divide.h"

namespace cutfuse {

namespace {

// Tiles that the scheduler keeps together for the L2. It pads the grid to whole groups, and a grid of eight by
// something padded to sixteen takes twice as long, so a group has to divide the grid.
int swizzle_for(GemmConfig const& config, GemmProblem const& problem) {
  if (product_of(config) == Product::kFma) return 1;  // such a kernel walks along one dimension
  constexpr int kLargestSwizzle = 8;
  int64_t const clusters_m = ceil_divide(ceil_divide(problem.m, config.tile_m), config.cluster_m);
  int64_t const clusters_n = ceil_divide(ceil_divide(problem.n, config.tile_n), config.cluster_n);
  int swizzle = kLargestSwizzle;
  while (swizzle > 1 && (clusters_m % swizzle != 0 || clusters_n % swizzle != 0)) {
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

// How many slices of K make the problem fastest: more than one only where all of them run at once. As many whether the
// weight comes as planes or is converted, because the bits of the result depend on them.
int slices_for(GemmConfig config, GemmProblem const& problem) {
  if (!is_over_planes(product_of(config))) return 1;
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
