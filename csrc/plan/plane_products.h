// fp32 products over planes of 16-bit parts: what they are made of, and their launches.
#pragma once

#include <vector>

#include "common/ceil_divide.h"
#include "plan/alternatives.h"
#include "split/planes_shape.h"

namespace cutfuse {

// The part of another way's time that products over planes have to be predicted to take: the predictions are within 6%
// of 52 measured problems.
constexpr double kPlaneAdvantage = 0.95;

// Where the planes of the weight come from.
enum class WeightSource {
  kPass,      // a pass of their own
  kOnTheWay,  // none is stored: the product splits the weight that it loads ("convert" in kernels' names)
  kExisting,  // the weight has them already
};

// One product over planes, with the passes before it.
struct PlaneProduct {
  SplitScheme scheme;
  WeightSource source;
  GemmProblem problem;
  GemmCandidate kernel;
  double microseconds;

  GemmConfig const& config() const { return gemm_configs()[kernel.config]; }
  // How many output tiles need memory for the sums of K's slices and for the count of slices that have arrived; 0 where
  // K is not sliced.
  int64_t tiles() const {
    int64_t const all = ceil_divide(problem.m, config().tile_m) * ceil_divide(problem.n, config().tile_n);
    return kernel.slices > 1 ? all : 0;
  }
};

// What runs as a rule and, guarded, what runs in its place where the guard trips.
using PlaneProducts = std::vector<PlaneProduct>;

// The ways of multiplying, which differ in where the planes of the weight come from.
std::vector<PlaneProducts> plane_ways(LinearRequest const& request);

Alternative describe(LinearRequest const& request, PlaneProducts const& products);

void add_plane_launches(LinearPlan& plan, LinearRequest const& request, PlaneProducts const& products);

}  // namespace cutfuse
