#include "plan/trained_pass.h"

#include <algorithm>

#include "plan/host_times.h"
#include "plan/unfused_predictions.h"

namespace cutfuse {
namespace {

constexpr double kPasses = 2.0;      // forwards and backwards
constexpr double kDerivative = 1.5;  // times the program's own cost
// Of torch.compile's: gelu of 38.7 million elements takes 78 us backwards, and 59 forwards.
constexpr double kGeneratedDerivative = 1.25;

// Columns of bf16 that torch.compile sums read 1.7 to 2.3 million bytes in a microsecond, behind the kernel that stores
// them: [12608, 3072] takes 33 us, [8192, 4096] 40 us, [12608, 768] 10 us. Kernels of ours sum blocks of rows where
// they compute the gradient, and add those in 8 to 10 us.
constexpr double kBytesPerMicrosecondOfColumns = 2.3e6;
constexpr double kFoldOfColumns = 10.0;

double elements_of(TrainedLayer const& layer) { return static_cast<double>(layer.m) * static_cast<double>(layer.n); }

double predict_own(TrainedLayer const& layer) {
  double const elements = elements_of(layer);
  double const work = layer.own_cost * kMicrosecondsPerElementAndFastOp;
  double const forward = predict_pass_microseconds(elements, layer.forward_bytes, work);
  double const backward = predict_pass_microseconds(elements, layer.backward_bytes, kDerivative * work);
  return forward + backward + (layer.sums_columns ? kFoldOfColumns : 0.0);
}

double predict_generated(TrainedLayer const& layer) {
  double const elements = elements_of(layer);
  double const work = layer.generated_cost * kMicrosecondsPerElementAndGeneratedOp;
  double const sum = kPassLaunch + elements * 2.0 / kBytesPerMicrosecondOfColumns;
  double const forward = predict_pass_microseconds(elements, layer.forward_bytes, work);
  double const backward = predict_pass_microseconds(elements, layer.backward_bytes, kGeneratedDerivative * work);
  return forward + backward + (layer.sums_columns ? sum : 0.0);
}

double predict_products(TrainedLayer const& layer) {
  constexpr bool kAsTf32 = false;
  GemmProblem problem = {};
  problem.m = layer.m;
  problem.n = layer.n;
  problem.k = problem.lda = problem.ldb = layer.k;
  problem.input = problem.output = DType::kBFloat16;
  problem.multiprocessors = layer.multiprocessors;
  return predict_training_products(problem, kAsTf32);
}

}  // namespace

StepTimes compare_passes(TrainedLayer const& layer) {
  constexpr double kProducts = 3.0;
  HostTimes const host = host_times(layer.issuer, DType::kBFloat16);
  double const own = kPasses * host.fused + (layer.sums_columns ? host.further : 0.0);
  double const generated = (kPasses + (layer.sums_columns ? 1.0 : 0.0)) * host.pass;
  double const products = predict_products(layer);
  auto const whole = [&](double passes, double issuing) {
    return std::max(products + passes, kProducts * host.product + issuing);
  };
  return {whole(predict_own(layer), own), whole(predict_generated(layer), generated)};
}

}  // namespace cutfuse
