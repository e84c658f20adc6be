// fp32 products over planes of 16-bit parts (split/planes.h): passes that split the operands, and a product over their
// planes. Guarded, split3 runs unless its operands' flags say that it would lose accuracy, and split6 otherwise. The
// device decides: the launches of both are made, and those of one return at once.
#pragma once

#include <vector>

#include "plan/gemm_configs.h"
#include "plan/linear_plan.h"

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

  GemmConfig const& config() const { return config_of(kernel); }
};

// What runs as a rule and, guarded, what runs in its place where the guard trips.
using PlaneProducts = std::vector<PlaneProduct>;

// The ways of multiplying, which differ in where the planes of the weight come from.
std::vector<PlaneProducts> plane_ways(LinearRequest const& request);

Alternative describe(LinearRequest const& request, PlaneProducts const& products);

// Lays out the workspace of a way, and its launches over it.
void add_plane_launches(LinearPlan& plan, LinearRequest const& request, PlaneProducts const& products);

// What all plans share.

bool reduces(LinearRequest const& request);

// Bytes that the kernel's partial states of a row reduction take; 0 where it stores the matrix.
int64_t partial_bytes(LinearRequest const& request, GemmConfig const& config);

FoldPartials fold(LinearRequest const& request, GemmConfig const& config, Piece const& partials);

}  // namespace cutfuse
