#include "plan/unfused_predictions.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/ceil_divide.h"
#include "plan/predictions.h"

namespace cutfuse {

namespace {

// cuBLAS's product of 16-bit matrices, as if it had these tiles: fitted to the same problems (mean error 10%).
struct CublasTile {
  int tile_m;
  int tile_n;
  double per_wave;
  double per_wave_of_1024_k;
};

constexpr CublasTile kCublasTiles[] = {
    {256, 128, 1.87, 10.3}, {128, 256, 1.87, 10.3}, {128, 128, 0.44, 10.15},
    {64, 256, 0.95, 5.1},   {64, 128, 0.95, 5.1},   {64, 64, 0.02, 2.71},
};
// cuBLAS in fp32, on CUDA cores: within 25% of 100 problems of M 1 to 8192, N and K 1024 to 8192 on an H200, but for up
// to 16 rows and N 1024, where it takes up to twice as long. For few rows it has kernels of their own.
double predict_ieee_product(GemmProblem const& problem) {
  constexpr double kStart = 12.0;
  double const m = static_cast<double>(problem.m);
  double const n = static_cast<double>(problem.n);
  double const k = static_cast<double>(problem.k);
  bool const is_skinny = problem.m <= 16 || (problem.m <= 32 && problem.n < 8192);
  double const bytes_per_microsecond = problem.m <= 4 ? 2.9e6 : (is_skinny ? 2.0e6 : 1.35e6);
  double const start = problem.m <= 4 || (problem.m <= 32 && !is_skinny) ? kStart / 2 : kStart;
  double const bytes = 4.0 * (m * k + n * k + m * n);
  double const operations = 2.0 * m * n * k;
  double const operations_per_microsecond = operations < 2.5e9 ? 40e6 : 48e6;
  return start + std::max(operations / operations_per_microsecond, bytes / bytes_per_microsecond);
}

// The same with a bias, for which PyTorch calls other kernels: those do not cut K into slices. Fitted to 107 problems
// of M 1 to 1500, N 68 to 7832 and K 64 to 7744 (mean error 22%).
double predict_ieee_product_and_bias(GemmProblem const& problem) {
  constexpr double kLargeOperations = 2.5e9;
  constexpr double kStartOfFewRows = 2.4;
  constexpr double kStart = 7.5;
  double const m = static_cast<double>(problem.m);
  double const n = static_cast<double>(problem.n);
  double const k = static_cast<double>(problem.k);
  double const bytes = 4.0 * (m * k + n * k + m * n);
  if (problem.m <= 4) return kStartOfFewRows + bytes / 2.57e6;
  if (problem.m <= 12) return kStartOfFewRows + std::max(bytes / 1.23e6, k * 4.7e-3);
  double const operations = 2.0 * m * n * k;
  if (operations >= kLargeOperations) return predict_ieee_product(problem);
  return std::max({kStart + operations / 37.7e6, kStart + bytes / 1.35e6, k * 23.2e-3});
}

double predict_ieee_microseconds(GemmProblem const& problem, bool has_bias) {
  return has_bias ? predict_ieee_product_and_bias(problem) : predict_ieee_product(problem);
}

// The compute time of a tile's waves where K is cut into so many slices.
double predict_cublas_waves(CublasTile const& tile, GemmProblem const& problem, int slices) {
  constexpr double kPerSlice = 0.6;
  int64_t const tiles = ceil_divide(problem.m, tile.tile_m) * ceil_divide(problem.n, tile.tile_n);
  auto const waves = static_cast<double>(ceil_divide(tiles * slices, std::max(problem.multiprocessors, 1)));
  double const factor = problem.input == DType::kFloat32 ? kTf32Factor : 1.0;
  double const per_wave = factor * tile.per_wave_of_1024_k * static_cast<double>(problem.k) / slices / 1024.0;
  return waves * (per_wave + tile.per_wave) + (slices > 1 ? kPerSlice * slices : 0.0);
}

// cuBLAS on tensor cores.
double predict_cublas_microseconds(GemmProblem const& problem) {
  constexpr double kStart = 2.55;
  constexpr double kCublasBytesPerMicrosecond = 3.3e6;
  constexpr int64_t kLeastSlice = 256;  // of K
  double compute = std::numeric_limits<double>::infinity();
  for (CublasTile const& tile : kCublasTiles) {
    for (int const slices : {1, 2, 4, 8}) {
      if (slices > 1 && problem.k / slices < kLeastSlice) continue;
      compute = std::min(compute, predict_cublas_waves(tile, problem, slices));
    }
  }
  double const m = static_cast<double>(problem.m);
  double const n = static_cast<double>(problem.n);
  double const written = m * n * static_cast<double>(size_of(problem.input));
  return kStart + std::max(compute, predict_reading_microseconds(problem) + written / kCublasBytesPerMicrosecond);
}

// One kernel over the result of a product in fp32.
double predict_second_kernel_microseconds(GemmProblem const& problem, float operand_bytes) {
  constexpr double kSecondLaunch = 3.5;
  constexpr double kBytesPerMicrosecondOfSecondKernel = 4.0e6;
  constexpr double kMicrosecondsPerElementAndOp = 0.45e-6;
  double const elements = static_cast<double>(problem.m) * problem.n;
  double const passes = problem.reduction == Reduction::kNone ? 2.0 : 1.0;
  double const bytes = passes * static_cast<double>(size_of(problem.input)) + operand_bytes;
  double const memory = elements * bytes / kBytesPerMicrosecondOfSecondKernel;
  double const interpretation = std::max(problem.epilogue_cost - 1.0f, 0.0f) * elements * kMicrosecondsPerElementAndOp;
  return kSecondLaunch + std::max(memory, interpretation);
}

double bytes_of_pass(GemmProblem const& problem, float operand_bytes) {
  bool const reduces = problem.reduction != Reduction::kNone;
  double const written = reduces ? 0.0 : static_cast<double>(size_of(problem.output));
  return static_cast<double>(size_of(problem.input)) + written + operand_bytes;  // for each element
}

// Of a kernel that reduces rows and has the program compiled in, over a matrix that is in L2 still. Estimated: what
// torch.compile takes beyond torch.mm on an H200 is 8 us for 1.4 million elements of 16 bits, 9 us for 2.4 million, 15
// to 18 us for 4.7, 19 us for 8.4 and 20 us for 9.4 million.
constexpr double kReductionLaunch = 4.0;
constexpr double kBytesPerMicrosecondOfReduction = 7.0e6;
// Behind a product on tensor cores that takes long both kernels are slower than alone: the card is at its power limit.
constexpr double kLongProduct = 60.0;

// One kernel that interprets the epilogue over the result of a product that took `product` microseconds.
double predict_interpreting_pass(GemmProblem const& problem, float operand_bytes, double product) {
  constexpr double kBytesPerMicrosecondOfPass = 2.2e6;
  constexpr double kMicrosecondsPerElementAndOp = 0.62e-6;
  constexpr double kFreeOps = 0.5;  // of cost: a chain that is compiled in
  constexpr double kSlowerPerMicrosecond = 0.08;
  double const elements = static_cast<double>(problem.m) * static_cast<double>(problem.n);
  double const memory = bytes_of_pass(problem, operand_bytes) / kBytesPerMicrosecondOfPass;
  double const interpretation = std::max(problem.epilogue_cost - kFreeOps, 0.0) * kMicrosecondsPerElementAndOp;
  double const slower = kSlowerPerMicrosecond * std::max(product - kLongProduct, 0.0);
  return kPassLaunch + elements * std::max(memory, interpretation) + slower;
}

// What a compiled pass moves. From 63 products of 16 bits with a kernel of torch.compile's behind them, which moved 4.0
// to 5.6 million bytes in a microsecond, or took 1.0 to 1.4e-6 us for an element and unit of cost.
constexpr double kBytesPerMicrosecondOfCompiledPass = 4.2e6;
constexpr double kMicrosecondsPerElementAndFastOp = 1.15e-6;

double predict_compiled_pass(GemmProblem const& problem, float operand_bytes, float cost, double product) {
  constexpr double kSlowerPerMicrosecond = 0.05;
  constexpr double kMicrosecondsPerElementAndAccurateOp = 1.2e-6;
  double const elements = static_cast<double>(problem.m) * static_cast<double>(problem.n);
  bool const is_fast = size_of(problem.input) == 2;
  double const per_op = is_fast ? kMicrosecondsPerElementAndFastOp : kMicrosecondsPerElementAndAccurateOp;
  bool const reduces = problem.reduction != Reduction::kNone;
  double const rate = reduces ? kBytesPerMicrosecondOfReduction : kBytesPerMicrosecondOfCompiledPass;
  double const memory = bytes_of_pass(problem, operand_bytes) / rate;
  double const slower = kSlowerPerMicrosecond * std::max(product - kLongProduct, 0.0);
  return (reduces ? kReductionLaunch : kPassLaunch) + elements * std::max(memory, cost * per_op) + slower;
}

double predict_pass(GemmProblem const& problem, float operand_bytes, std::optional<float> compiled_cost,
                    double product) {
  return compiled_cost ? predict_compiled_pass(problem, operand_bytes, *compiled_cost, product)
                       : predict_interpreting_pass(problem, operand_bytes, product);
}

}  // namespace

double predict_memory_microseconds(double bytes) { return bytes / kBytesPerMicrosecondOfCompiledPass; }

double predict_pass_microseconds(double elements, double bytes, double cost) {
  return kPassLaunch + elements * std::max(predict_memory_microseconds(bytes), cost * kMicrosecondsPerElementAndFastOp);
}

double predict_training_products(GemmProblem const& problem, bool as_tf32) {
  GemmProblem of_x = problem;
  std::swap(of_x.n, of_x.k);
  GemmProblem of_weight = problem;
  std::swap(of_weight.m, of_weight.k);
  bool const on_cores = problem.input == DType::kFloat32 && !as_tf32;
  auto const predict = on_cores ? predict_ieee_product : predict_cublas_microseconds;
  return predict(problem) + predict(of_x) + predict(of_weight);
}

double predict_training_microseconds(GemmProblem const& problem, bool as_tf32) {
  constexpr double kBytesPerMicrosecondOfPasses = 2.2e6;
  constexpr double kPasses = 8.0;  // z and y, then grad, z and grad z, then grad z for the bias and either product
  double const bytes = static_cast<double>(size_of(problem.output)) * problem.m * problem.n;
  return predict_training_products(problem, as_tf32) + kPasses * bytes / kBytesPerMicrosecondOfPasses;
}

double predict_unfused_microseconds(GemmProblem const& problem, float operand_bytes, std::optional<float> compiled_cost,
                                    bool has_bias) {
  bool const on_cores = problem.product != Product::kDirect;
  bool const is_bare = problem.epilogue_cost == 0.0f && problem.reduction == Reduction::kNone &&
                       (on_cores || problem.output == problem.input);
  double const product = on_cores ? predict_ieee_microseconds(problem, has_bias) : predict_cublas_microseconds(problem);
  if (is_bare) return product;
  return product + (on_cores ? predict_second_kernel_microseconds(problem, operand_bytes)
                             : predict_pass(problem, operand_bytes, compiled_cost, product));
}

}  // namespace cutfuse
