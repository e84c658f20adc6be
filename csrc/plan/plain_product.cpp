// Plans of one kernel that takes the operands as they are, or copies of them in lines that the copy engine takes.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/division.h"
#include "plan/alternatives.h"
#include "plan/predictions.h"

namespace cutfuse {

namespace {

// Why no kernel takes the operands, whatever their sizes and whatever is computed.
std::string why_not(LinearRequest const& request) {
  std::string elsewhere = why_no_kernels(request.device);
  if (!elsewhere.empty()) return elsewhere;
  std::string unread = why_lines_are_not_read(request);
  if (!unread.empty() || !request.joins_weights()) return unread;
  std::string const misaligned = " does not start at a multiple of " + std::to_string(kOperandAlignment) + " bytes";
  if (!request.x.aligned) return "x" + misaligned;
  return request.weight.aligned ? "" : "weight" + misaligned;
}

// A product as a kernel takes it, and what has to be copied for that.
struct AlignedProduct {
  GemmProblem problem;
  std::vector<AlignedCopy> copies;
  bool copies_bias;
};

int64_t bytes_of(int64_t elements, DType dtype) { return elements * static_cast<int64_t>(size_of(dtype)); }

bool is_whole(int64_t elements, DType dtype) { return bytes_of(elements, dtype) % kOperandAlignment == 0; }

int64_t whole_pitch(int64_t elements, DType dtype) { return round_up(elements, elements_per_vector(dtype)); }

// pitch: that of the lines, and then of those that the kernel reads. A single line has no next one, which would have to
// begin at a boundary.
void align_operand(AlignedProduct& product, CopiedMatrix matrix, MatrixLayout const& layout, bool by_columns,
                   int64_t& pitch) {
  DType const dtype = product.problem.input;
  int64_t const lines = by_columns ? layout.columns : layout.rows;
  int64_t const length = by_columns ? layout.rows : layout.columns;
  int64_t const given = pitch;
  if (layout.aligned && is_whole(given, dtype)) return;
  pitch = whole_pitch(length, dtype);
  if (!layout.aligned || lines > 1) product.copies.push_back({matrix, lines, length, given, pitch, {}});
}

AlignedProduct align(LinearRequest const& request) {
  AlignedProduct product = {problem_of(request, Product::kPlain), {}, false};
  if (request.joins_weights()) return product;
  GemmProblem& problem = product.problem;
  align_operand(product, CopiedMatrix::kX, request.x, reads_columns_of_x(problem.layout), problem.lda);
  align_operand(product, CopiedMatrix::kWeight, request.weight, reads_columns_of_weight(problem.layout), problem.ldb);
  if (!reduces(request) && !is_whole(problem.n, problem.output)) {
    problem.ldd = whole_pitch(problem.n, problem.output);
    product.copies.push_back({CopiedMatrix::kResult, problem.m, problem.n, problem.ldd, problem.n, {}});
  }
  product.copies_bias =
      request.bias && (!request.bias->aligned || (request.bias->stride != 1 && request.weight.rows != 1));
  return product;
}

int count_copies(AlignedProduct const& product) {
  return static_cast<int>(product.copies.size()) + (product.copies_bias ? 1 : 0);
}

// predict: of the rows and columns of a copy, which lie in whatever order, and their type.
template <class Predict>
double predict_copies(AlignedProduct const& product, Predict const& predict) {
  double microseconds = product.copies_bias ? predict(1, product.problem.n, product.problem.input) : 0.0;
  for (AlignedCopy const& copy : product.copies) {
    bool const is_result = copy.matrix == CopiedMatrix::kResult;
    microseconds += predict(copy.lines, copy.length, is_result ? product.problem.output : product.problem.input);
  }
  return microseconds;
}

// The bytes at multiples of which all lines begin that cuBLAS reads and stores.
int64_t alignment_of(LinearRequest const& request, GemmProblem const& problem) {
  if (!request.x.aligned || !request.weight.aligned) return bytes_of(1, problem.input);
  int64_t const elements = std::gcd(std::gcd(problem.lda, problem.ldb), problem.n);
  return std::gcd(bytes_of(elements, problem.input), kOperandAlignment);
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

// Whether torch.compile's compiler makes what is not fused.
bool is_inductors(LinearRequest const& request) {
  return request.issuer != Issuer::kCall && request.issuer != Issuer::kTraining;
}

// What the program takes in the pass behind cuBLAS's product; empty where that interprets it.
std::optional<double> work_of_pass(LinearRequest const& request) {
  if (is_inductors(request)) return kMicrosecondsPerElementAndGeneratedOp * request.generated_cost;
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
    microseconds += predict_unfused_microseconds(problem, 0.0f, {}, false, alignment_of(request, problem));
  }
  double const host = host_times(request).product * static_cast<double>(request.joined_rows.size());
  return {"cuBLAS, one product for each weight", microseconds, compared(microseconds, host, request), 1,
          std::move(rejection)};
}

// In compiled code Inductor pads the matrices where that is faster.
Alternative cublas_for(LinearRequest const& request, AlignedProduct const& aligned, bool is_alone) {
  std::string rejection = is_alone ? "" : why_not_cublas(request);
  GemmProblem problem = problem_of(request, Product::kPlain);
  if (request.joins_weights()) return cublas_for_each(request, problem, std::move(rejection));
  problem.epilogue_cost = request.epilogue_cost;
  auto const predict = [&](int64_t alignment) {
    return predict_unfused_microseconds(problem, request.operand_bytes, work_of_pass(request), false, alignment);
  };
  double microseconds = predict(alignment_of(request, problem));
  if (is_inductors(request)) {
    double const padding = predict_copies(aligned, predict_padding_microseconds);
    microseconds = std::min(microseconds, predict(kOperandAlignment) + padding);
  }
  bool const is_bare = problem.epilogue_cost == 0.0f && !reduces(request) && problem.output == problem.input;
  return cublas_alternative(request, "cuBLAS", microseconds, is_bare, std::move(rejection));
}

// Copies have to be worth their time on the device, whatever the host saves.
Alternative alternative_with_copies(LinearRequest const& request, GemmCandidate const& candidate,
                                    AlignedProduct const& product, Alternative const& cublas) {
  int const copies = count_copies(product);
  Alternative found = alternative_of(request, candidate, copies, predict_copies(product, predict_copy_microseconds));
  bool const is_slower = found.microseconds >= cublas.microseconds;
  if (copies > 0 && found.rejection.empty() && cublas.rejection.empty() && is_slower) {
    found.rejection = "would take " + std::to_string(std::llround(found.microseconds)) +
                      " us (predicted) with copies to rows of whole " + std::to_string(kOperandAlignment) +
                      " bytes, and cuBLAS " + std::to_string(std::llround(cublas.microseconds));
  }
  return found;
}

}  // namespace

double predict_way(LinearRequest const& request, std::string const& name) {
  AlignedProduct const product = align(request);
  for (GemmConfig const& config : gemm_configs()) {
    if (config.name != name) continue;
    return predict_microseconds(config, product.problem, 1, {request.operand_bytes, request.fetched_bytes});
  }
  return cublas_for(request, product, true).microseconds;
}

LinearPlan plan_plain_product(LinearRequest const& request, std::string const& only) {
  std::string const reason = why_not(request);
  if (!reason.empty()) return plan_without_kernels(request, reason);
  AlignedProduct const product = align(request);
  GemmProblem const& problem = product.problem;
  std::string const unread = why_columns_are_not_read(request, problem);
  if (!unread.empty()) return plan_without_kernels(request, unread);
  std::vector<GemmCandidate> const candidates = candidates_for(problem, {request.operand_bytes, request.fetched_bytes});
  LinearPlan plan = {};
  Alternative const cublas = cublas_for(request, product, !candidates.front().rejection.empty());
  for (GemmCandidate const& candidate : candidates) {
    plan.alternatives.push_back(alternative_with_copies(request, candidate, product, cublas));
  }
  choose(plan, cublas, only);
  if (plan.is_fused()) {
    add_product_launches(plan, request, problem, candidates[plan.chosen], product.copies);
    plan.copies_bias = product.copies_bias;
  } else {
    add_cublas_launches(plan, request);
  }
  return plan;
}

}  // namespace cutfuse
