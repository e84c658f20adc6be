#include "plan/trained_pass.h"

#include <algorithm>

#include "plan/host_times.h"
#include "plan/predictions.h"

namespace cutfuse {
namespace {

constexpr double kPasses = 2.0;      // forwards and backwards
constexpr double kDerivative = 1.5;  // times the program's own cost

// Of an element and unit of cost: what torch.compile's kernels took beyond torch.mm behind 42 products of 16 bits, of
// which the median is 1.05 where they were bound by instructions. They compute in fp32 to its full accuracy.
constexpr double kMicrosecondsPerElementAndGeneratedOp = 1.05e-6;

// Columns of bf16 that torch.compile sums read 1.7 to 2.3 million bytes in a microsecond, behind the kernel that stores
// them: [12608, 3072] takes 33 us, [8192, 4096] 40 us, [12608, 768] 10 us. Kernels of ours sum blocks of rows where
// they compute the gradient, and add those in 8 to 10 us.
constexpr double kBytesPerMicrosecondOfColumns = 2.3e6;
constexpr double kFoldOfColumns = 10.0;

double predict_own(TrainedPass const& pass) {
  double const elements = static_cast<double>(pass.elements);
  double const forward = predict_pass_microseconds(elements, pass.forward_bytes, pass.own_cost);
  double const backward = predict_pass_microseconds(elements, pass.backward_bytes, kDerivative * pass.own_cost);
  return forward + backward + (pass.sums_columns ? kFoldOfColumns : 0.0);
}

double predict_generated(TrainedPass const& pass) {
  double const elements = static_cast<double>(pass.elements);
  auto const predict = [&](double bytes, double cost) {
    double const memory = predict_memory_microseconds(elements * bytes);
    return kPassLaunch + std::max(memory, elements * cost * kMicrosecondsPerElementAndGeneratedOp);
  };
  double const sum = kPassLaunch + elements * 2.0 / kBytesPerMicrosecondOfColumns;
  double const forward = predict(pass.forward_bytes, pass.generated_cost);
  double const backward = predict(pass.backward_bytes, kDerivative * pass.generated_cost);
  return forward + backward + (pass.sums_columns ? sum : 0.0);
}

// Ours are operators, whose functions lay out their tensors in Python.
Issuer issuer_of_operators(Issuer issuer) { return issuer == Issuer::kGraph ? issuer : Issuer::kCompiledCpp; }

}  // namespace

PassTimes compare_passes(TrainedPass const& pass) {
  double const operators = kPasses * host_times(issuer_of_operators(pass.issuer)).fused;
  double const kernels = (kPasses + (pass.sums_columns ? 1.0 : 0.0)) * host_times(pass.issuer).pass;
  return {compared(predict_own(pass), operators, pass.issuer), compared(predict_generated(pass), kernels, pass.issuer)};
}

}  // namespace cutfuse
