#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/division.h"
#include "plan/predictions.h"

namespace cutfuse {

namespace {

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

// cuBLAS's product on tensor cores, as if it took the fastest of all tiles of these rows and of columns in steps of 16,
// either way round, and in tf32 of powers of two. Fitted to the bf16 layers of 1,287 shapes that predictions.cpp names
// (mean error 8%).
constexpr int kCublasRows[] = {64, 128, 192, 256};
constexpr int kCublasMostColumns = 256;
constexpr int kCublasLargestTile = 128 * 256;

// What 1024 of K take of 128x128 elements, on a device of which each multiprocessor has a tile.
double predict_cublas_loop(GemmProblem const& problem) {
  CublasTimes const& times = numbers_of(problem).cublas;
  double const factor = problem.input == DType::kFloat32 ? kTf32Factor : 1.0;
  double const lines =
      1.0 + times.per_further_line * further_lines(problem) + times.per_further_sector * further_sectors(problem);
  return factor * lines * times.per_1024_k;
}

// The compute time of a tile's waves where K is cut into so many slices. loop: see predict_cublas_loop.
double predict_cublas_waves(int tile_m, int tile_n, GemmProblem const& problem, int slices, double loop) {
  CublasTimes const& times = numbers_of(problem).cublas;
  double const multiprocessors = std::max(problem.multiprocessors, 1);
  int64_t const tiles = ceil_divide(problem.m, tile_m) * ceil_divide(problem.n, tile_n) * slices;
  double const waves = std::ceil(static_cast<double>(tiles) / multiprocessors);
  double const occupancy = std::min(static_cast<double>(tiles) / multiprocessors, 1.0);
  double const area = tile_m * tile_n / (128.0 * 128.0);
  double const perimeter = (tile_m + tile_n) / (128.0 + 128.0);
  double const k = static_cast<double>(problem.k) / slices / 1024.0;
  // The tensor cores take as long as the area, and what comes to them as the perimeter.
  double const contended = loop * k * std::max(area, perimeter) * (1.0 - times.contention * (1.0 - occupancy));
  return waves * (contended + area * times.per_area) + (slices > 1 ? times.per_slice * slices : 0.0);
}

double predict_fastest_cublas_waves(GemmProblem const& problem) {
  constexpr int64_t kLeastSlice = 256;  // of K
  bool const as_tf32 = problem.input == DType::kFloat32;
  double const loop = predict_cublas_loop(problem);
  double least = std::numeric_limits<double>::infinity();
  for (int const slices : {1, 2, 4, 8}) {
    if (slices > 1 && problem.k / slices < kLeastSlice) continue;
    for (int const rows : kCublasRows) {
      int const most = std::min(kCublasMostColumns, kCublasLargestTile / rows);
      for (int columns = as_tf32 ? 64 : 32; columns <= most; columns += as_tf32 ? columns : 16) {
        least = std::min({least, predict_cublas_waves(rows, columns, problem, slices, loop),
                          predict_cublas_waves(columns, rows, problem, slices, loop)});
      }
    }
  }
  return least;
}

// What cuBLAS's kernels for lines that do not begin at multiples of 16 bytes take for one of the others, at least, on
// an H200 in bf16. 10653x5769x2740, whose lines begin at multiples of 8 bytes and its result's of 2, took 6650 us, 13
// times what is predicted of aligned lines; 5794x5958x1472 with a result at multiples of 4 bytes 1031 us, 7 times as
// much. By what whole models took in eager mode, 65536x1024x479 took 5 to 6 times as much, and 196608x384x196 and
// 196608x196x384, at multiples of 8 bytes, more than that. Single rows and columns are multiplied by kernels that read
// single elements whatever their alignment.
double predict_misalignment(GemmProblem const& problem, int64_t alignment) {
  constexpr double kOfOtherLines = 5.0;
  return alignment >= kOperandAlignment || problem.m == 1 || problem.n == 1 ? 1.0 : kOfOtherLines;
}

// cuBLAS on tensor cores.
double predict_cublas_microseconds(GemmProblem const& problem, int64_t alignment = kOperandAlignment) {
  CublasTimes const& times = numbers_of(problem).cublas;
  double const elements = static_cast<double>(problem.m) * static_cast<double>(problem.n);
  double const written = elements * static_cast<double>(size_of(problem.input)) / times.written_bytes_per_microsecond;
  double const compute = predict_misalignment(problem, alignment) * predict_fastest_cublas_waves(problem);
  return times.start + std::max(compute, predict_reading_microseconds(problem) + written);
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

// Of a kernel that interprets a program over a matrix, or has none to interpret.
constexpr double kBytesPerMicrosecondOfPass = 2.2e6;

double bytes_of_copy(int64_t rows, int64_t columns, DType dtype) {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(size_of(dtype));
}

// One kernel that interprets the epilogue over the result of a product that took `product` microseconds.
double predict_interpreting_pass(GemmProblem const& problem, float operand_bytes, double product) {
  constexpr double kMicrosecondsPerElementAndOp = 0.62e-6;
  constexpr double kFreeOps = 0.5;  // of cost: a chain that is compiled in
  constexpr double kSlowerPerMicrosecond = 0.08;
  double const elements = static_cast<double>(problem.m) * static_cast<double>(problem.n);
  double const memory = bytes_of_pass(problem, operand_bytes) / kBytesPerMicrosecondOfPass;
  double const interpretation = std::max(problem.epilogue_cost - kFreeOps, 0.0) * kMicrosecondsPerElementAndOp;
  double const slower = kSlowerPerMicrosecond * std::max(product - kLongProduct, 0.0);
  return kPassLaunch + elements * std::max(memory, interpretation) + slower;
}

// What a compiled pass moves: most of the first 24 MB lie in L2 still. From 2,574 products of 1,287 shapes with gelu or
// a residual behind them, which moved 4.0 million bytes in a microsecond beyond those.
constexpr double kBytesInL2 = 24e6;
constexpr double kBytesPerMicrosecondOfL2 = 6.5e6;
constexpr double kBytesPerMicrosecondOfCompiledPass = 4.0e6;

double predict_compiled_pass(GemmProblem const& problem, float operand_bytes, double work, double product) {
  constexpr double kSlowerPerMicrosecond = 0.05;
  double const elements = static_cast<double>(problem.m) * static_cast<double>(problem.n);
  bool const reduces = problem.reduction != Reduction::kNone;
  double const bytes = elements * bytes_of_pass(problem, operand_bytes);
  double const memory = reduces ? bytes / kBytesPerMicrosecondOfReduction : predict_memory_microseconds(bytes);
  double const slower = kSlowerPerMicrosecond * std::max(product - kLongProduct, 0.0);
  return (reduces ? kReductionLaunch : kPassLaunch) + std::max(memory, elements * work) + slower;
}

double predict_pass(GemmProblem const& problem, float operand_bytes, std::optional<double> compiled_work,
                    double product) {
  return compiled_work ? predict_compiled_pass(problem, operand_bytes, *compiled_work, product)
                       : predict_interpreting_pass(problem, operand_bytes, product);
}

}  // namespace

double predict_memory_microseconds(double bytes) {
  double const in_l2 = std::min(bytes, kBytesInL2);
  return in_l2 / kBytesPerMicrosecondOfL2 + (bytes - in_l2) / kBytesPerMicrosecondOfCompiledPass;
}

double predict_pass_microseconds(double elements, double bytes, double work) {
  return kPassLaunch + std::max(predict_memory_microseconds(elements * bytes), elements * work);
}

double predict_copy_microseconds(int64_t rows, int64_t columns, DType dtype) {
  return kPassLaunch + bytes_of_copy(rows, columns, dtype) / kBytesPerMicrosecondOfPass;
}

// Beside the product of aligned matrices, as predicted, the two shapes above took torch.compile 1221 and 388 us.
double predict_padding_microseconds(int64_t rows, int64_t columns, DType dtype) {
  constexpr double kBytesPerMicrosecondOfPadding = 0.6e6;
  return kPassLaunch + bytes_of_copy(rows, columns, dtype) / kBytesPerMicrosecondOfPadding;
}

double predict_training_products(GemmProblem const& problem, bool as_tf32) {
  GemmProblem of_x = problem;
  std::swap(of_x.n, of_x.k);
  of_x.lda = problem.n;  // the gradient's rows; the weight's, and those of x below, are as long as forwards
  GemmProblem of_weight = problem;
  std::swap(of_weight.m, of_weight.k);
  of_weight.lda = problem.n;
  bool const on_cores = problem.input == DType::kFloat32 && !as_tf32;
  auto const predict = [&](GemmProblem const& product) {
    return on_cores ? predict_ieee_product(product) : predict_cublas_microseconds(product);
  };
  return predict(problem) + predict(of_x) + predict(of_weight);
}

double predict_training_microseconds(GemmProblem const& problem, bool as_tf32) {
  constexpr double kBytesPerMicrosecondOfPasses = 2.2e6;
  constexpr double kPasses = 8.0;  // z and y, then grad, z and grad z, then grad z for the bias and either product
  double const bytes = static_cast<double>(size_of(problem.output)) * problem.m * problem.n;
  return predict_training_products(problem, as_tf32) + kPasses * bytes / kBytesPerMicrosecondOfPasses;
}

double predict_unfused_microseconds(GemmProblem const& problem, float operand_bytes,
                                    std::optional<double> compiled_work, bool has_bias, int64_t alignment) {
  bool const on_cores = problem.product != Product::kPlain;
  bool const is_bare = problem.epilogue_cost == 0.0f && problem.reduction == Reduction::kNone &&
                       (on_cores || problem.output == problem.input);
  double const product =
      on_cores ? predict_ieee_microseconds(problem, has_bias) : predict_cublas_microseconds(problem, alignment);
  if (is_bare) return product;
  return product + (on_cores ? predict_second_kernel_microseconds(problem, operand_bytes)
                             : predict_pass(problem, operand_bytes, compiled_work, product));
}

}  // namespace cutfuse
