#include "plan/linear_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "common/division.h"
#include "plan/alternatives.h"
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

}  // namespace

std::string strides_of(MatrixLayout const& matrix) {
  return "(" + std::to_string(matrix.row_stride) + ", " + std::to_string(matrix.column_stride) + ")";
}

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

Alternative alternative_of(LinearRequest const& request, GemmCandidate const& kernel, int copies,
                           double copies_microseconds) {
  HostTimes const host_time = host_times(request);
  double const host = host_time.fused + copies * host_time.further;
  double const microseconds = kernel.rejection.empty() ? kernel.microseconds + copies_microseconds : 0.0;
  return {config_of(kernel).name, microseconds, compared(microseconds, host, request), kernel.slices, kernel.rejection};
}

Alternative cublas_alternative(LinearRequest const& request, std::string const& product, double microseconds,
                               bool is_bare, std::string rejection) {
  HostTimes const host_time = host_times(request);
  double const host = host_time.product + (is_bare ? 0.0 : host_time.pass);
  return {is_bare ? product : product + " and one more kernel", microseconds, compared(microseconds, host, request), 1,
          std::move(rejection)};
}

void add_product_launches(LinearPlan& plan, LinearRequest const& request, GemmProblem const& problem,
                          GemmCandidate const& kernel, std::vector<AlignedCopy> const& copies) {
  MemoryLayout workspace(Memory::kWorkspace);
  GemmConfig const& config = config_of(kernel);
  FusedProduct product = {};
  product.problem = problem;
  product.kernel = kernel;
  product.partials = workspace.add(partial_bytes(request, config));
  product.when = SplitRun::kAlways;
  std::vector<Launch> behind;
  if (reduces(request)) behind.emplace_back(fold(request, config, product.partials));
  for (AlignedCopy copy : copies) {
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

LinearPlan plan_without_kernels(LinearRequest const& request, std::string reason) {
  LinearPlan plan = {};
  plan.ruled_out = std::move(reason);
  plan.alternatives = {{"cuBLAS", 0.0, 0.0, 1, {}}};
  add_cublas_launches(plan, request);
  return plan;
}

LinearPlan plan_linear(LinearRequest const& request, std::string const& only) {
  check(request);
  bool const is_fp32 = request.input == DType::kFloat32 && request.precision != Precision::kTf32;
  LinearPlan plan = is_fp32 ? plan_fp32_product(request, only) : plan_plain_product(request, only);
  if (!only.empty() && !plan.ruled_out.empty()) throw std::invalid_argument(only + " cannot run: " + plan.ruled_out);
  plan.request = request;
  plan.output_shape = {request.x.rows};
  if (!reduces(request)) plan.output_shape.push_back(request.weight.rows);
  return plan;
}

}  // namespace cutfuse
