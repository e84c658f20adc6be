// Plans of fp32 products at their own accuracy: on tensor cores, over planes of 16-bit parts; on CUDA cores, by one
// kernel of fused multiply-adds; or by cuBLAS.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "plan/host_times.h"
#include "plan/operand_layouts.h"
#include "plan/plane_products.h"
#include "plan/unfused_predictions.h"

namespace cutfuse {

namespace {

// Products over planes, or one kernel on CUDA cores.
struct Way {
  Alternative alternative;
  PlaneProducts planes;  // empty for one kernel
  GemmCandidate kernel;
};

bool is_bare(LinearRequest const& request) { return !reduces(request) && request.epilogue_cost == 0.0f; }

// The other precisions say how to multiply.
bool may_choose(LinearRequest const& request) { return request.precision == Precision::kGuarded; }

void add_plane_ways(std::vector<Way>& ways, LinearRequest const& request) {
  for (PlaneProducts& products : plane_ways(request)) {
    Alternative alternative = describe(request, products);
    ways.push_back({std::move(alternative), std::move(products), {}});
  }
}

// A bias with gaps would have to be copied first.
bool reads_bias(LinearRequest const& request) {
  return !request.bias || request.bias->stride == 1 || request.weight.rows == 1;
}

void add_fma_ways(std::vector<Way>& ways, LinearRequest const& request) {
  if (!may_choose(request) || !why_lines_are_not_read(request).empty() || !reads_bias(request)) return;
  double const host = host_times(request.issuer, request.input).fused;
  OperandBytes const operand_bytes = {request.operand_bytes, request.fetched_bytes};
  for (GemmCandidate const& kernel : rank_gemm_configs(problem_of(request, Product::kFma), operand_bytes)) {
    if (!kernel.computes) continue;
    ways.push_back({{gemm_configs()[kernel.config].name, kernel.microseconds,
                     compared(kernel.microseconds, host, request.issuer, request.input), 1, kernel.rejection},
                    {},
                    kernel});
  }
}

std::vector<Way> ways_of(LinearRequest const& request) {
  std::vector<Way> ways;
  add_plane_ways(ways, request);
  add_fma_ways(ways, request);
  std::stable_sort(ways.begin(), ways.end(), [](Way const& x, Way const& y) {
    bool const x_runs = x.alternative.rejection.empty();
    bool const y_runs = y.alternative.rejection.empty();
    return x_runs != y_runs ? x_runs : x.alternative.compared < y.alternative.compared;
  });
  return ways;
}

// Why no kernel takes the operands, whatever their sizes.
std::string why_not(LinearRequest const& request) {
  if (request.precision == Precision::kIeee) return "float32 products run through cuBLAS in precision \"ieee\"";
  std::string elsewhere = why_no_kernels(request.device);
  if (!elsewhere.empty() || request.output == DType::kFloat32) return elsewhere;
  return std::string("products of float32 matrices store float32, not ") + name_of(request.output);
}

Alternative cublas_for(LinearRequest const& request, bool is_alone) {
  GemmProblem problem = problem_of(request, Product::kFma);
  problem.epilogue_cost = request.epilogue_cost;  // which the pass behind it interprets
  bool const is_asked = may_choose(request) || is_alone;
  double const microseconds =
      predict_unfused_microseconds(problem, request.operand_bytes, {}, request.bias.has_value());
  HostTimes const host_time = host_times(request.issuer, request.input);
  double const host = host_time.product + (is_bare(request) ? 0.0 : host_time.pass);
  return {is_bare(request) ? "cuBLAS in fp32" : "cuBLAS in fp32 and one more kernel", microseconds,
          compared(microseconds, host, request.issuer, request.input), 1,
          is_asked ? "" : "precision \"" + std::string(name_of(request.precision)) + "\" leaves no choice"};
}

void add_fma_launch(LinearPlan& plan, LinearRequest const& request, GemmCandidate const& kernel) {
  FusedProduct product = {};
  product.problem = problem_of(request, Product::kFma);
  product.kernel = kernel;
  product.when = SplitRun::kAlways;
  plan.launches = {product};
}

}  // namespace

LinearPlan plan_fp32_product(LinearRequest const& request, std::string const& only) {
  std::string const reason = why_not(request);
  if (!reason.empty()) return plan_without_kernels(request, reason);
  std::vector<Way> const ways = ways_of(request);
  LinearPlan plan = {};
  for (Way const& way : ways) plan.alternatives.push_back(way.alternative);
  bool const is_alone = !plan.alternatives.front().rejection.empty();
  choose(plan, cublas_for(request, is_alone), only);
  if (!plan.is_fused()) {
    add_cublas_launches(plan, request);
  } else if (Way const& way = ways[plan.chosen]; way.planes.empty()) {
    add_fma_launch(plan, request, way.kernel);
  } else {
    add_plane_launches(plan, request, way.planes);
  }
  return plan;
}

}  // namespace cutfuse
