#include "plan/linear_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include "common/division.h"
#include "plan/plane_products.h"
#include "plan/predictions.h"
#include "reduce/reduce_plan.h"
#include "reduce/reductions.h"

namespace cutfuse {

Piece MemoryLayout::add(int64_t bytes) {
  Piece const piece = {memory_, end_, bytes};
  end_ += round_up(bytes, kPieceAlignment);
  bytes_ = std::max(bytes_, end_);
  return piece;
}

WeightPlanes lay_weight_planes(PlanesShape const& shape) {
  MemoryLayout layout(Memory::kWeightPlanes);
  Piece const values = layout.add(shape.value_bytes);
  Piece const scales = layout.add(shape.scale_bytes);
  Piece const flags = layout.add(shape.flag_bytes);
  return {{values, scales, flags}, layout.bytes()};
}

namespace {

bool has_contiguous_rows(MatrixLayout const& matrix) { return matrix.column_stride == 1 || matrix.columns == 1; }

// Columns that overlap, as those of an expanded vector do, are left to PyTorch.
bool has_contiguous_columns(MatrixLayout const& matrix) {
  return (matrix.row_stride == 1 || matrix.rows == 1) && matrix.column_stride >= matrix.rows;
}

bool has_contiguous_lines(MatrixLayout const& matrix) {
  return has_contiguous_rows(matrix) || has_contiguous_columns(matrix);
}

// By rows where the strides allow both, because more kernels read rows.
ProductLayout layout_for(MatrixLayout const& x, MatrixLayout const& weight) {
  if (!has_contiguous_rows(x)) return ProductLayout::kTN;
  return has_contiguous_rows(weight) ? ProductLayout::kNT : ProductLayout::kNN;
}

// Elements between the lines that are read.
int64_t pitch_of(MatrixLayout const& matrix, bool by_columns) {
  if (by_columns) return matrix.columns > 1 ? matrix.column_stride : matrix.rows;
  return matrix.rows > 1 ? matrix.row_stride : matrix.columns;
}

std::string shape_of(MatrixLayout const& matrix) {
  return "[" + std::to_string(matrix.rows) + ", " + std::to_string(matrix.columns) + "]";
}

void check(LinearRequest const& request) {
  bool const sizes = request.x.rows >= 0 && request.weight.rows >= 0 && request.x.columns >= 0;
  if (!sizes || request.x.columns != request.weight.columns) {
    throw std::invalid_argument("x has to be [M, K] and weight [N, K], got " + shape_of(request.x) + " and " +
                                shape_of(request.weight));
  }
  int64_t const rows = std::accumulate(request.joined_rows.begin(), request.joined_rows.end(), int64_t{0});
  if (request.joins_weights() && (rows != request.weight.rows || request.epilogue_cost > 0.0f || reduces(request) ||
                                  request.output != request.input || request.stores_pre_activation)) {
    throw std::invalid_argument("weights are joined for products alone, whose columns are the rows of all: got " +
                                std::to_string(rows) + " of " + shape_of(request.weight));
  }
  if (request.batch_invariant && request.precision == Precision::kGuarded) {
    throw std::invalid_argument(
        "guarded products look at all rows to choose a scheme: batch-invariant ones need another");
  }
  if (request.device.major > 0 && request.device.multiprocessors < 1) {
    throw std::invalid_argument("a CUDA device has at least one multiprocessor, got " +
                                std::to_string(request.device.multiprocessors));
  }
}

std::string names_of(std::vector<Alternative> const& alternatives) {
  std::string names;
  for (Alternative const& alternative : alternatives) {
    std::string const fault = alternative.rejection.empty() ? "" : " (" + alternative.rejection + ")";
    names += (names.empty() ? "" : ", ") + alternative.name + fault;
  }
  return names;
}

// What the reduction of cuBLAS's result leaves between its launches.
int64_t reduction_bytes(LinearRequest const& request) {
  ReduceExtents const extents = {request.x.rows, request.weight.rows, 1};
  if (is_empty(extents) || request.device.multiprocessors == 0) return 0;
  return static_cast<int64_t>(
      reduce_workspace(extents, request.input, request.reduction, request.device.multiprocessors));
}

// Strides in elements, as messages give them.
std::string strides_of(MatrixLayout const& matrix) {
  return "(" + std::to_string(matrix.row_stride) + ", " + std::to_string(matrix.column_stride) + ")";
}

// Why no kernel reads the operands, by their strides; empty where some do.
std::string why_lines_are_not_read(LinearRequest const& request) {
  if (!has_contiguous_lines(request.x)) {
    return "x has strides " + strides_of(request.x) + ": neither its rows nor its columns are contiguous";
  }
  if (!has_contiguous_lines(request.weight)) {
    return "weight has strides " + strides_of(request.weight) + ": neither its rows nor its columns are contiguous";
  }
  if (!has_contiguous_rows(request.x) && !has_contiguous_columns(request.weight)) {
    return "x has strides " + strides_of(request.x) + " and weight " + strides_of(request.weight) +
           ": kernels that read x by columns read the weight by columns too";
  }
  return {};
}

// The product of operands whose lines are read.
GemmProblem problem_of(LinearRequest const& request, Product product) {
  ProductLayout const layout = layout_for(request.x, request.weight);
  return {
      request.x.rows,
      request.weight.rows,
      request.x.columns,
      pitch_of(request.x, reads_columns_of_x(layout)),
      pitch_of(request.weight, reads_columns_of_weight(layout)),
      request.input,
      request.output,
      request.reduction,
      request.device.multiprocessors,
      request.fused_cost(),
      product,
      request.specialized_cost.has_value(),
      request.stores_pre_activation,
      layout,
      std::accumulate(request.joined_rows.begin(), request.joined_rows.end(), int64_t{0}, std::gcd<int64_t, int64_t>),
      request.batch_invariant,
      0,
      request.device.times};
}

// Whether fp32 matrices are multiplied at their own accuracy: on tensor cores, over planes of 16-bit parts; on CUDA
// cores, by one kernel of fused multiply-adds; or by cuBLAS.
bool is_at_own_accuracy(LinearRequest const& request) {
  return request.input == DType::kFloat32 && request.precision != Precision::kTf32;
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

// Why no kernel takes the operands, whatever their sizes.
std::string why_not(LinearRequest const& request) {
  bool const is_fp32 = is_at_own_accuracy(request);
  if (is_fp32 && request.precision == Precision::kIeee) {
    return "float32 products run through cuBLAS in precision \"ieee\"";
  }
  std::string elsewhere = why_no_kernels(request.device);
  if (!elsewhere.empty()) return elsewhere;
  if (is_fp32) {
    if (request.output == DType::kFloat32) return {};
    return std::string("products of float32 matrices store float32, not ") + name_of(request.output);
  }
  std::string unread = why_lines_are_not_read(request);
  if (!unread.empty()) return unread;
  if (request.joins_weights() && !(request.x.aligned && request.weight.aligned)) {
    return std::string(request.x.aligned ? "weight" : "x") + " does not start at a multiple of " +
           std::to_string(kOperandAlignment) + " bytes";
  }
  return why_columns_are_not_read(request, problem_of(request, Product::kPlain));
}

// A way of computing the layer by kernels of the table: one, and copies around it, or products over planes.
struct Way {
  Alternative alternative;
  GemmCandidate kernel;
  PlaneProducts planes;  // empty for one kernel
};

Way way_of(LinearRequest const& request, GemmCandidate const& kernel, AlignedProduct const& product) {
  int const copies = count_copies(product);
  HostTimes const host_time = host_times(request);
  double const host = host_time.fused + copies * host_time.further;
  double const copying = predict_copies(product, predict_copy_microseconds);
  double const microseconds = kernel.rejection.empty() ? kernel.microseconds + copying : 0.0;
  return {
      {config_of(kernel).name, microseconds, compared(microseconds, host, request), kernel.slices, kernel.rejection},
      kernel,
      {}};
}

// By kernels that compute what is asked for; by all of them where none does, so that each says what it computes
// instead, unless there are others.
void add_kernels(std::vector<Way>& ways, LinearRequest const& request, AlignedProduct const& product) {
  bool const has_others = !ways.empty();
  OperandBytes const operand_bytes = {request.operand_bytes, request.fetched_bytes};
  std::vector<GemmCandidate> const all = rank_gemm_configs(product.problem, operand_bytes);
  bool const are_fitting =
      std::any_of(all.begin(), all.end(), [](GemmCandidate const& candidate) { return candidate.computes; });
  for (GemmCandidate const& candidate : all) {
    if (candidate.computes || !(are_fitting || has_others)) ways.push_back(way_of(request, candidate, product));
  }
}

// The other precisions say how to multiply.
bool may_choose(LinearRequest const& request) { return request.precision == Precision::kGuarded; }

// A bias with gaps would have to be copied first.
bool reads_bias(LinearRequest const& request) {
  return !request.bias || request.bias->stride == 1 || request.weight.rows == 1;
}

// Batch-invariant products are over planes wherever these can be multiplied, which M does not decide.
bool may_use_cuda_cores(LinearRequest const& request, std::vector<Way> const& plane_ways) {
  if (!why_lines_are_not_read(request).empty() || !reads_bias(request)) return false;
  if (!request.batch_invariant) return may_choose(request);
  return std::none_of(plane_ways.begin(), plane_ways.end(),
                      [](Way const& way) { return way.alternative.rejection.empty(); });
}

std::vector<Way> ways_of(LinearRequest const& request, AlignedProduct const& product) {
  std::vector<Way> ways;
  if (!is_at_own_accuracy(request)) {
    add_kernels(ways, request, product);
    return ways;
  }
  for (PlaneProducts& products : plane_ways(request)) {
    Alternative alternative = describe(request, products);
    ways.push_back({std::move(alternative), {}, std::move(products)});
  }
  if (may_use_cuda_cores(request, ways)) add_kernels(ways, request, product);
  std::stable_sort(ways.begin(), ways.end(), [](Way const& x, Way const& y) {
    bool const x_runs = x.alternative.rejection.empty();
    bool const y_runs = y.alternative.rejection.empty();
    return x_runs != y_runs ? x_runs : x.alternative.compared < y.alternative.compared;
  });
  return ways;
}

// Bytes of [M, N]. A matrix that is no larger stays in an H200's L2 of 50 MB between cuBLAS and the kernel that reduces
// it, and its memory matters little.
constexpr double kLargestReducedMatrix = 32.0 * (1 << 20);

// Why cuBLAS is not to multiply; empty where it may.
std::string why_not_cublas(LinearRequest const& request) {
  if (request.batch_invariant) return "cuBLAS chooses by the number of rows in which order it adds";
  if (is_at_own_accuracy(request)) {
    return may_choose(request) ? "" : "precision \"" + std::string(name_of(request.precision)) + "\" leaves no choice";
  }
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
  bool const is_fp32 = is_at_own_accuracy(request);
  GemmProblem problem = problem_of(request, is_fp32 ? Product::kFma : Product::kPlain);
  if (request.joins_weights() && !is_fp32) return cublas_for_each(request, problem, std::move(rejection));
  problem.epilogue_cost = request.epilogue_cost;  // which the pass behind it interprets
  std::optional<double> const work = is_fp32 ? std::nullopt : work_of_pass(request);
  auto const predict = [&](int64_t alignment) {
    return predict_unfused_microseconds(problem, request.operand_bytes, work, request.bias.has_value(), alignment);
  };
  double microseconds = predict(alignment_of(request, problem));
  if (!is_fp32 && is_inductors(request)) {
    double const padding = predict_copies(aligned, predict_padding_microseconds);
    microseconds = std::min(microseconds, predict(kOperandAlignment) + padding);
  }
  bool const is_bare = problem.epilogue_cost == 0.0f && !reduces(request) && problem.output == problem.input;
  std::string const product = is_fp32 ? "cuBLAS in fp32" : "cuBLAS";
  HostTimes const host_time = host_times(request);
  double const host = host_time.product + (is_bare ? 0.0 : host_time.pass);
  return {is_bare ? product : product + " and one more kernel", microseconds, compared(microseconds, host, request), 1,
          std::move(rejection)};
}

// Copies have to be worth their time on the device, whatever the host saves.
void reject_slow_copies(Alternative& way, Alternative const& cublas) {
  if (!way.rejection.empty() || !cublas.rejection.empty() || way.microseconds < cublas.microseconds) return;
  way.rejection = "would take " + std::to_string(std::llround(way.microseconds)) +
                  " us (predicted) with copies to rows of whole " + std::to_string(kOperandAlignment) +
                  " bytes, and cuBLAS " + std::to_string(std::llround(cublas.microseconds));
}

// Puts cuBLAS behind the fused alternatives and chooses: the one with the least to compare, a fused one where they are
// equal.
void choose(LinearPlan& plan, Alternative cublas, std::string const& only) {
  plan.alternatives.push_back(std::move(cublas));
  plan.chosen = -1;
  for (int index = 0; index < static_cast<int>(plan.alternatives.size()); ++index) {
    Alternative const& candidate = plan.alternatives[index];
    bool const runs = only.empty() ? candidate.rejection.empty() : candidate.name == only && candidate.microseconds > 0;
    if (runs && (plan.chosen < 0 || candidate.compared < plan.alternatives[plan.chosen].compared)) plan.chosen = index;
  }
  if (plan.chosen < 0) {
    throw std::invalid_argument(only + " cannot run; there are " + names_of(plan.alternatives));
  }
}

// The launches of one kernel, and of the copies before and behind it, which have no memory yet.
void add_product_launches(LinearPlan& plan, LinearRequest const& request, AlignedProduct const& aligned,
                          GemmCandidate const& kernel) {
  MemoryLayout workspace(Memory::kWorkspace);
  GemmConfig const& config = config_of(kernel);
  FusedProduct product = {};
  product.problem = aligned.problem;
  product.kernel = kernel;
  product.partials = workspace.add(partial_bytes(request, config));
  product.when = SplitRun::kAlways;
  std::vector<Launch> behind;
  if (reduces(request)) behind.emplace_back(fold(request, config, product.partials));
  for (AlignedCopy copy : aligned.copies) {
    bool const is_result = copy.matrix == CopiedMatrix::kResult;
    DType const dtype = is_result ? request.output : request.input;
    int64_t const elements = copy.lines * (is_result ? copy.from_pitch : copy.to_pitch);
    copy.aligned = workspace.add(elements * static_cast<int64_t>(size_of(dtype)));
    (is_result                         ? product.result
     : copy.matrix == CopiedMatrix::kX ? product.x.values
                                       : product.weight.values) = copy.aligned;
    (is_result ? behind : plan.launches).emplace_back(copy);
  }
  plan.launches.emplace_back(product);
  plan.launches.insert(plan.launches.end(), behind.begin(), behind.end());
  plan.workspace_bytes = workspace.bytes();
  plan.copies_bias = aligned.copies_bias;
}

void add_cublas_launches(LinearPlan& plan, LinearRequest const& request) {
  plan.launches = {CublasProduct{}};
  if (reduces(request)) {
    plan.launches.emplace_back(ReductionPass{});
    plan.workspace_bytes = reduction_bytes(request);
  } else if (request.epilogue_cost > 0.0f || request.output != request.input) {
    plan.launches.emplace_back(PointwisePass{request.output == request.input && !request.stores_pre_activation});
  }
}

LinearPlan plan_ways(LinearRequest const& request, std::string const& only) {
  bool const is_fp32 = is_at_own_accuracy(request);
  AlignedProduct const product =
      is_fp32 ? AlignedProduct{problem_of(request, Product::kFma), {}, false} : align(request);
  std::vector<Way> ways = ways_of(request, product);
  Alternative const cublas = cublas_for(request, product, !ways.front().alternative.rejection.empty());
  LinearPlan plan = {};
  for (Way& way : ways) {
    if (count_copies(product) > 0) reject_slow_copies(way.alternative, cublas);
    plan.alternatives.push_back(way.alternative);
  }
  choose(plan, cublas, only);
  if (!plan.is_fused()) {
    add_cublas_launches(plan, request);
  } else if (Way const& way = ways[plan.chosen]; way.planes.empty()) {
    add_product_launches(plan, request, product, way.kernel);
  } else {
    add_plane_launches(plan, request, way.planes);
  }
  return plan;
}

// By cuBLAS, because no fused kernel is an alternative.
LinearPlan plan_without_kernels(LinearRequest const& request, std::string reason) {
  LinearPlan plan = {};
  plan.ruled_out = std::move(reason);
  plan.alternatives = {{"cuBLAS", 0.0, 0.0, 1, {}}};
  add_cublas_launches(plan, request);
  return plan;
}

}  // namespace

std::string why_no_kernels(DeviceFacts const& device) {
  if (device.major == 9 && device.minor == 0) return {};
  if (device.major == 0) return "fused products run on CUDA devices alone";
  return "fused products need compute capability 9.0, this device has " + std::to_string(device.major) + "." +
         std::to_string(device.minor);
}

bool reduces(LinearRequest const& request) { return request.reduction != Reduction::kNone; }

int64_t partial_bytes(LinearRequest const& request, GemmConfig const& config) {
  if (!reduces(request)) return 0;
  int64_t const states = ceil_divide(request.weight.rows, config.tile_n) * request.x.rows;
  return states * partial_width(request.reduction) * static_cast<int64_t>(sizeof(float));
}

FoldPartials fold(LinearRequest const& request, GemmConfig const& config, Piece const& partials) {
  return {partials, ceil_divide(request.weight.rows, config.tile_n), request.batch_invariant};
}

double predict_way(LinearRequest const& request, std::string const& name) {
  AlignedProduct const product = align(request);
  for (GemmConfig const& config : gemm_configs()) {
    if (config.name != name) continue;
    return predict_microseconds(config, product.problem, 1, {request.operand_bytes, request.fetched_bytes});
  }
  return cublas_for(request, product, true).microseconds;
}

LinearPlan plan_linear(LinearRequest const& request, std::string const& only) {
  check(request);
  std::string const reason = why_not(request);
  LinearPlan plan = reason.empty() ? plan_ways(request, only) : plan_without_kernels(request, reason);
  if (!only.empty() && !plan.ruled_out.empty()) throw std::invalid_argument(only + " cannot run: " + plan.ruled_out);
  plan.request = request;
  plan.output_shape = {request.x.rows};
  if (!reduces(request)) plan.output_shape.push_back(request.weight.rows);
  return plan;
}

}  // namespace cutfuse
