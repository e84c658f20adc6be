// How a linear layer is computed: what is launched in which order, over which memory, and why not otherwise. Running a
// call, explaining it and the tests read this one object. Host code that knows no CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "plan/gemm_candidates.h"
#include "plan/linear_request.h"
#include "plan/workspace.h"

namespace cutfuse {

// The launches of a plan. Those that wait for a guard are always launched: what the guard's flags say is known on the
// device alone, and a kernel whose turn it is not returns at once. A guard is flags of operands' planes.

// Splits x or the weight into planes.
struct SplitPass {
  bool is_weight;
  SplitScheme scheme;
  PlanesPieces planes;
  Piece cleared;             // set to zero on the way: the arrivals of the product that follows
  std::vector<Piece> guard;  // empty where it always runs
  SplitRun when;
};

// The matrix product with what follows it, by one kernel.
struct FusedProduct {
  GemmProblem problem;
  GemmCandidate kernel;
  PlanesPieces x;  // without bytes, as the next one, where the operand is read as it is
  PlanesPieces weight;
  Piece weight_flags;  // that splitting the weight on its way in leaves
  Piece sums;          // of slices of K, and the tiles at which they arrive: see KSlices
  Piece arrivals;
  Piece partials;  // that a row reduction leaves: fp32 [tiles along N, M, partial_width(reduction)]
  std::vector<Piece> guard;
  SplitRun when;
};

// Folds the partials of a row reduction to the result.
struct FoldPartials {
  Piece partials;
  int64_t tiles;
};

// x @ weight^T + bias by PyTorch.
struct CublasProduct {};

// program(z, operands) over cuBLAS's result; in place where that has the result's type.
struct PointwisePass {
  bool in_place;
};

// reduce(program(z, operands)) over cuBLAS's result.
struct ReductionPass {};

using Launch = std::variant<SplitPass, FusedProduct, FoldPartials, CublasProduct, PointwisePass, ReductionPass>;

// A way of computing the layer, with all its launches.
struct Alternative {
  std::string name;       // of its kernel, or "cuBLAS ..."
  double microseconds;    // predicted; 0 where no kernel takes the problem
  double compared;        // what the choice compares: microseconds, weighed with what the predictions' error is worth
  int slices;             // of K
  std::string rejection;  // why it cannot or is not to run, whatever it would take; empty otherwise
};

struct LinearPlan {
  LinearRequest request;
  std::string ruled_out;                  // why no fused kernel is an alternative; empty where some are
  std::vector<Alternative> alternatives;  // fused ones by what is compared, then rejected ones, and cuBLAS last
  int chosen;
  std::vector<Launch> launches;
  int64_t workspace_bytes;            // of all launches together
  std::vector<int64_t> output_shape;  // [M, N], or [M]
  bool copies_bias;                   // to contiguous, aligned memory first
  bool reads_weight_planes;           // those that the weight has already

  bool is_fused() const { return chosen + 1 < static_cast<int>(alternatives.size()); }
};

// Empty on devices that have fused kernels.
std::string why_no_kernels(DeviceFacts const& device);

// Whether the host takes longer to issue the training step of a layer whose products cuBLAS runs, forwards and
// backwards, than the device to run it. as_tf32: fp32 products do so in tf32.
bool training_waits_for_host(int64_t m, int64_t n, int64_t k, DType dtype, int32_t multiprocessors, bool as_tf32);

// `only` names the one alternative that is wanted, whatever it would take: for tests and measurements; empty for the
// fastest. Throws std::invalid_argument for a request that is none, or where `only` cannot run.
LinearPlan plan_linear(LinearRequest const& request, std::string const& only = {});

}  // namespace cutfuse
