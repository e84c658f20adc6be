// What issuing launches takes of the host, and the choices that depend on it.
#include <algorithm>

#include "plan/predictions.h"

namespace cutfuse {

// In eager code beside a quiet host, where PyTorch's own operations take 12 us each: of blocks of a norm and two
// layers, a layer takes 12 to 13 us as one kernel, and 22 to 27 by PyTorch's product and a kernel of ours. Called in a
// loop, which keeps everything in the host's caches, they take 8 and 16. The times of fp32, tf32 included, are those of
// such a loop, because its choices were compared by the time of whole calls. In compiled code a further layer of 32
// rows takes 10 us as one kernel, 16 as a product, and 26 as a product and a Triton kernel, beside an H100 whose host
// takes 1.3 times as long as the one of these times. Behind the dispatcher a fused kernel takes 30.
//
// The shares: with gelu, twelve blocks 768/3072 of 1576 rows take 1.10 of eager's time with a product by cuBLAS and
// PyTorch's own gelu, and 0.94 with one kernel, which keeps the device busy for as long. Of 83 stacks of such blocks in
// bf16, drawn at random, none was faster where the host counted for less than here. Compiled code does less besides.
HostTimes host_times(Issuer issuer, DType input) {
  constexpr double kFurther = 3.0;
  switch (issuer) {
    case Issuer::kCall:
    case Issuer::kTraining:
      if (input == DType::kFloat32) return {8.5, kFurther, 13.0, 9.0, 0.2};
      return {12.5, kFurther, 15.0, 7.0, 0.1};
    case Issuer::kCompiledCode:
      return {8.0, kFurther, 12.0, 7.5, 0.1};
    case Issuer::kCompiledCpp:
      return {30.0, kFurther, 12.0, 7.0, 0.2};
    case Issuer::kGraph:
      break;
  }
  return {0.0, 0.0, 0.0, 0.0, 0.0};
}

// A device that is done sooner than the host issues its work waits for the host. In a training step that waits for the
// host as a whole, the device counts for less: the smallest such steps keep it busy for a quarter of the time, the
// largest for nearly all of it.
double compared(double device_microseconds, double host_microseconds, LinearRequest const& request) {
  constexpr double kShareOfDevice = 0.35;
  if (request.issuer == Issuer::kTraining) return host_microseconds + kShareOfDevice * device_microseconds;
  double const share = host_times(request).share;
  return std::max(device_microseconds, host_microseconds) + share * host_microseconds;
}

namespace {

double predict_step(TrainedShape const& shape, DType dtype, int32_t multiprocessors, bool as_tf32) {
  auto const [m, n, k] = shape;
  GemmProblem const problem = {
      m, n, k, k, k, dtype, dtype, Reduction::kNone, multiprocessors, 0.0f, Product::kPlain, false, false};
  return predict_training_microseconds(problem, as_tf32);
}

}  // namespace

bool training_waits_for_host(TrainedShape const& shape, DType dtype, int32_t multiprocessors, bool as_tf32) {
  // Of linear, gelu and their backward pass in blocks, PyTorch's and by its products: 125 to 150. Kernels of ours take
  // 100, and steps of 12 blocks 1152/2304 of 2366 rows, 104 by prediction, 1.16 of eager's time without them.
  // Those of fp32 were compared where PyTorch's took 100.
  double const host_microseconds = dtype == DType::kFloat32 ? 100.0 : 130.0;
  return predict_step(shape, dtype, multiprocessors, as_tf32) < host_microseconds;
}

bool mlp_waits_for_host(TrainedShape const& first, TrainedShape const& last, DType dtype, int32_t multiprocessors,
                        bool as_tf32) {
  // 1503x1504x1040 in bf16 with gelu took 194 as one node where eager's took 111, when a node took 1.2 times the host's
  // time that it takes since, by a CPU that stands for a GPU. There its layers one after another take 0.7 of it.
  constexpr double kHostMicroseconds = 150.0;
  double const steps =
      predict_step(first, dtype, multiprocessors, as_tf32) + predict_step(last, dtype, multiprocessors, as_tf32);
  return steps < kHostMicroseconds;
}

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

// work: of an element forwards, which is `derivative` times as much backwards. sum: of columns, where they are summed.
double predict_passes(TrainedLayer const& layer, double work, double derivative, double sum) {
  double const elements = elements_of(layer);
  double const forward = predict_pass_microseconds(elements, layer.forward_bytes, work);
  double const backward = predict_pass_microseconds(elements, layer.backward_bytes, derivative * work);
  return forward + backward + (layer.sums_columns ? sum : 0.0);
}

double predict_own(TrainedLayer const& layer) {
  return predict_passes(layer, layer.own_cost * kMicrosecondsPerElementAndFastOp, kDerivative, kFoldOfColumns);
}

double predict_generated(TrainedLayer const& layer) {
  double const sum = kPassLaunch + elements_of(layer) * 2.0 / kBytesPerMicrosecondOfColumns;
  return predict_passes(layer, layer.generated_cost * kMicrosecondsPerElementAndGeneratedOp, kGeneratedDerivative, sum);
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
