#include "plan/linear_plan.h"

#include <numeric>
#include <stdexcept>
#include <utility>

#include "common/ceil_divide.h"
#include "plan/alternatives.h"
#include "plan/unfused_predictions.h"
#include "reduce/reduce_plan.h"
#include "reduce/reductions.h"

namespace cutfuse {

namespace {

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
  if (extents.outer == 0 || extents.reduced == 0 || request.device.multiprocessors == 0) return 0;
  return static_cast<int64_t>(
      reduce_workspace(extents, request.input, request.reduction, request.device.multiprocessors));
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
  return {partials, ceil_divide(request.weight.rows, config.tile_n)};
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

bool training_waits_for_host(int64_t m, int64_t n, int64_t k, DType dtype, int32_t multiprocessors, bool as_tf32) {
  // Of linear, gelu and their backward pass in blocks, PyTorch's and by its products: 125 to 150. Kernels of ours take
  // 100, and steps of 12 blocks 1152/2304 of 2366 rows, 104 by prediction, 1.16 of eager's time without them.
  // Those of fp32 were compared where PyTorch's took 100.
  double const host_microseconds = dtype == DType::kFloat32 ? 100.0 : 130.0;
  GemmProblem const problem = {
      m, n, k, k, k, dtype, dtype, Reduction::kNone, multiprocessors, 0.0f, Product::kDirect, false, false};
  return predict_training_microseconds(problem, as_tf32) < host_microseconds;
}

LinearPlan plan_linear(LinearRequest const& request, std::string const& only) {
  check(request);
  bool const is_fp32 = request.input == DType::kFloat32 && request.precision != Precision::kTf32;
  LinearPlan plan = is_fp32 ? plan_fp32_product(request, only) : plan_direct_product(request, only);
  if (!only.empty() && !plan.ruled_out.empty()) throw std::invalid_argument(only + " cannot run: " + plan.ruled_out);
  plan.request = request;
  plan.output_shape = {request.x.rows};
  if (!reduces(request)) plan.output_shape.push_back(request.weight.rows);
  return plan;
}

}  // namespace cutfuse
