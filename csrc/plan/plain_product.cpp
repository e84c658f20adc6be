// Plans of one kernel that takes the operands as they are.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/alternatives.h"
#include "plan/predictions.h"

namespace cutfuse {

namespace {

// Why no kernel takes the operands, whatever their sizes and whatever is computed.
std::string why_not(LinearRequest const& request) {
  std::string elsewhere = why_no_kernels(request.device);
  if (!elsewhere.empty()) return elsewhere;
  std::string unread = why_lines_are_not_read(request);
  if (!unread.empty()) return unread;
  std::string const misaligned = " does not start at a multiple of " + std::to_string(kOperandAlignment) + " bytes";
  if (!request.x.aligned) return "x" + misaligned;
  if (!request.weight.aligned) return "weight" + misaligned;
  if (!request.bias) return {};
  if (!request.bias->aligned) return "bias" + misaligned;
  if (request.bias->stride != 1 && request.weight.rows != 1) {
    return "bias has stride " + std::to_string(request.bias->stride) + ": it is not contiguous";
  }
  return {};
}

// Why an operand by columns rules all kernels out; empty where some of the table read it.
std::string why_columns_are_not_read(LinearRequest const& request, GemmProblem const& problem) {
  auto const& configs = gemm_configs();
  bool const are_read =
      std::any_of(configs.begin(), configs.end(), [&](GemmConfig const& config) { return computes(config, problem); });
  if (are_read || problem.layout == ProductLayout::kNT) return {};
  std::string const readers = reduces(request)                   ? "kernels that reduce rows"
                              : problem.input == DType::kFloat32 ? "kernels of float32 operands"
                                                                 : "kernels that store another type than they read";
  bool const is_of_x = reads_columns_of_x(problem.layout);
  return (is_of_x ? "x has strides " : "weight has strides ") + strides_of(is_of_x ? request.x : request.weight) +
         ": its rows are not contiguous, as " + readers + " need them";
}

// Kernels that compute what is asked for; all of them where none does, so that each says what it computes instead.
std::vector<GemmCandidate> candidates_for(GemmProblem const& problem, OperandBytes operand_bytes) {
  std::vector<GemmCandidate> const all = rank_gemm_configs(problem, operand_bytes);
  std::vector<GemmCandidate> fitting;
  std::copy_if(all.begin(), all.end(), std::back_inserter(fitting),
               [](GemmCandidate const& candidate) { return candidate.computes; });
  return fitting.empty() ? all : fitting;
}

// Bytes of [M, N]. A matrix that is no larger stays in an H200's L2 of 50 MB between cuBLAS and the kernel that reduces
// it, and its memory matters little.
constexpr double kLargestReducedMatrix = 32.0 * (1 << 20);

// Why cuBLAS is not to multiply; empty where it may.
std::string why_not_cublas(LinearRequest const& request) {
  if (request.batch_invariant) return kChosenByRows;
  double const elements = static_cast<double>(request.x.rows) * static_cast<double>(request.weight.rows);
  double const bytes = elements * static_cast<double>(size_of(request.input));
  if (!reduces(request) || bytes <= kLargestReducedMatrix) return {};
  return "a large row reduction is always fused: the matrix of " + std::to_string(std::llround(bytes / 1e6)) +
         " MB that it reduces is not allocated";
}

// What the program takes in the pass behind cuBLAS's product; empty where that interprets it.
std::optional<double> work_of_pass(LinearRequest const& request) {
  bool const is_inductors = request.issuer != Issuer::kCall && request.issuer != Issuer::kTraining;
  if (is_inductors) return kMicrosecondsPerElementAndGeneratedOp * request.generated_cost;
  int64_t const row_bytes = request.weight.rows * static_cast<int64_t>(size_of(request.input));
  bool const whole_vectors = row_bytes % kOperandAlignment == 0;  // which reductions are compiled for
  if (!request.specialized_cost || (reduces(request) && !whole_vectors)) return {};
  bool const is_fast = size_of(request.input) == 2;
  return *request.specialized_cost *
         (is_fast ? kMicrosecondsPerElementAndFastOp : kMicrosecondsPerElementAndAccurateOp);
}

// Products of one x with several weights, by cuBLAS one after another.
Alternative cublas_for_each(LinearRequest const& request, GemmProblem problem, std::string rejection) {
  double microseconds = 0.0;
  for (int64_t const rows : request.joined_rows) {
    problem.n = rows;
    microseconds += predict_unfused_microseconds(problem, 0.0f, {});
  }
  double const host = host_times(request).product * static_cast<double>(request.joined_rows.size());
  return {"cuBLAS, one product for each weight", microseconds, compared(microseconds, host, request), 1,
          std::move(rejection)};
}

Alternative cublas_for(LinearRequest const& request, GemmProblem problem, bool is_alone) {
  std::string rejection = is_alone ? "" : why_not_cublas(request);
  if (request.joins_weights()) return cublas_for_each(request, problem, std::move(rejection));
  problem.epilogue_cost = request.epilogue_cost;
  double const microseconds = predict_unfused_microseconds(problem, request.operand_bytes, work_of_pass(request));
  bool const is_bare = problem.epilogue_cost == 0.0f && !reduces(request) && problem.output == problem.input;
  return cublas_alternative(request, "cuBLAS", microseconds, is_bare, std::move(rejection));
}

}  // namespace

LinearPlan plan_plain_product(LinearRequest const& request, std::string const& only) {
  std::string const reason = why_not(request);
  if (!reason.empty()) return plan_without_kernels(request, reason);
  GemmProblem const problem = problem_of(request, Product::kPlain);
  std::string const unread = why_columns_are_not_read(request, problem);
  if (!unread.empty()) return plan_without_kernels(request, unread);
  std::vector<GemmCandidate> const candidates = candidates_for(problem, {request.operand_bytes, request.fetched_bytes});
  LinearPlan plan = {};
  for (GemmCandidate const& candidate : candidates) plan.alternatives.push_back(alternative_of(request, candidate));
  choose(plan, cublas_for(request, problem, !candidates.front().rejection.empty()), only);
  if (plan.is_fused()) {
    add_product_launches(plan, request, problem, candidates[plan.chosen]);
  } else {
    add_cublas_launches(plan, request);
  }
  return plan;
}

}  // namespace cutfuse
