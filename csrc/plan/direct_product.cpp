// Plans of one kernel that takes the operands as they are.
#include <algorithm>
#include <string>
#include <vector>

#include "plan/alternatives.h"
#include "plan/predictions.h"

namespace cutfuse {

namespace {

// How much faster cuBLAS and one more kernel have to be predicted before they are chosen: below the predictions' own
// error of 7% one launch and no matrix in between is the better choice.
constexpr double kUnfusedAdvantage = 1.05;

std::string strides_of(MatrixLayout const& matrix) {
  return "(" + std::to_string(matrix.row_stride) + ", " + std::to_string(matrix.column_stride) + ")";
}

// Why no kernel takes the operands, whatever their sizes.
std::string why_not(LinearRequest const& request) {
  std::string const elsewhere = why_no_kernels(request.device);
  if (!elsewhere.empty()) return elsewhere;
  struct Named {
    char const* name;
    MatrixLayout const& layout;
  };
  Named const matrices[] = {{"x", request.x}, {"weight", request.weight}};
  for (auto const& [name, matrix] : matrices) {
    if (matrix.column_stride != 1 && matrix.columns != 1) {
      return std::string(name) + " has strides " + strides_of(matrix) + ": its rows are not contiguous";
    }
  }
  std::string const misaligned = " does not start at a multiple of " + std::to_string(kOperandAlignment) + " bytes";
  for (auto const& [name, matrix] : matrices) {
    if (!matrix.aligned) return name + misaligned;
  }
  if (!request.bias) return {};
  if (!request.bias->aligned) return "bias" + misaligned;
  if (request.bias->stride != 1 && request.weight.rows != 1) {
    return "bias has stride " + std::to_string(request.bias->stride) + ": it is not contiguous";
  }
  return {};
}

GemmProblem problem_of(LinearRequest const& request) {
  int64_t const k = request.x.columns;
  auto const pitch = [&](MatrixLayout const& matrix) { return matrix.rows > 1 ? matrix.row_stride : k; };
  return {request.x.rows,        request.weight.rows,   k,
          pitch(request.x),      pitch(request.weight), request.input,
          request.output,        request.reduction,     request.device.multiprocessors,
          request.epilogue_cost, Product::kDirect};
}

// Kernels that compute what is asked for; all of them where none does, so that each says what it computes instead.
std::vector<GemmCandidate> candidates_for(GemmProblem const& problem) {
  std::vector<GemmCandidate> const all = rank_gemm_configs(problem);
  std::vector<GemmCandidate> fitting;
  std::copy_if(all.begin(), all.end(), std::back_inserter(fitting),
               [](GemmCandidate const& candidate) { return candidate.computes; });
  return fitting.empty() ? all : fitting;
}

Alternative cublas_for(GemmProblem const& problem, bool is_alone) {
  double const microseconds = predict_unfused_microseconds(problem);
  bool const reduces = problem.reduction != Reduction::kNone;
  return {"cuBLAS and one more kernel", microseconds, kUnfusedAdvantage * microseconds, 1,
          reduces && !is_alone ? "a row reduction is always fused: the matrix that it reduces is never allocated" : ""};
}

void add_launches(LinearPlan& plan, LinearRequest const& request, GemmProblem const& problem,
                  GemmCandidate const& kernel) {
  MemoryLayout workspace(Memory::kWorkspace);
  GemmConfig const& config = gemm_configs()[kernel.config];
  FusedProduct product = {};
  product.problem = problem;
  product.kernel = kernel;
  product.partials = workspace.add(partial_bytes(request, config));
  product.when = SplitRun::kAlways;
  plan.launches = {product};
  if (reduces(request)) plan.launches.emplace_back(fold(request, config, product.partials));
  plan.workspace_bytes = workspace.bytes();
}

}  // namespace

LinearPlan plan_direct_product(LinearRequest const& request, std::string const& only) {
  std::string const reason = why_not(request);
  if (!reason.empty()) return plan_without_kernels(request, reason);
  GemmProblem const problem = problem_of(request);
  std::vector<GemmCandidate> const candidates = candidates_for(problem);
  LinearPlan plan = {};
  for (GemmCandidate const& candidate : candidates) {
    double const microseconds = candidate.microseconds;
    plan.alternatives.push_back(
        {gemm_configs()[candidate.config].name, microseconds, microseconds, candidate.slices, candidate.rejection});
  }
  choose(plan, cublas_for(problem, !candidates.front().rejection.empty()), only);
  if (plan.is_fused()) {
    add_launches(plan, request, problem, candidates[plan.chosen]);
  } else {
    add_cublas_launches(plan, request);
  }
  return plan;
}

}  // namespace cutfuse
