// How long kernels take, cuBLAS's among them, and issuing their launches takes of the host, predicted: in microseconds,
// fitted to measurements on an H200.
#pragma once

#include <cstdint>
#include <optional>

#include "common/dtype.h"
#include "plan/gemm_configs.h"
#include "plan/linear_plan.h"

namespace cutfuse {

// The table by which a problem is predicted.
inline DeviceNumbers const& numbers_of(GemmProblem const& problem) {
  return problem.times ? problem.times->numbers : device_times().front().numbers;
}

// One kernel of the table, with K in so many slices.
double predict_microseconds(GemmConfig const& config, GemmProblem const& problem, int slices,
                            OperandBytes operand_bytes = {});

// Reading x and the weight once from memory.
double predict_reading_microseconds(GemmProblem const& problem);

// How many more cache lines a tile's rows of 128 bytes touch where the rows of x and the weight do not begin at
// multiples of 128 bytes: 0 to 7/8 of a line. The copy engine asks the L2 for each line.
double further_lines(GemmProblem const& problem);

// For how many of x and the weight, 0 to 1 of both, rows do not begin at multiples of a sector of 32 bytes: rows of 128
// bytes then touch five.
double further_sectors(GemmProblem const& problem);

constexpr double kTf32Factor = 2.05;  // what a product takes in tf32 for one of 16 bits and as much of K

// One pass that splits an fp32 matrix into planes.
double predict_split_microseconds(int64_t rows, int64_t columns);

// One kernel that copies a matrix to rows of another pitch.
double predict_copy_microseconds(int64_t rows, int64_t columns, DType dtype);

// The same by a kernel that torch.compile's compiler makes.
double predict_padding_microseconds(int64_t rows, int64_t columns, DType dtype);

// The alternative: cuBLAS, then one pointwise or reduction kernel over its result. A product over planes or by fused
// multiply-adds is compared with cuBLAS in fp32, whose kernels a bias decides. compiled_work: the microseconds that an
// element takes of a kernel that has the program compiled in; empty for one that interprets it. alignment: the bytes at
// multiples of which the lines of x, the weight and cuBLAS's result begin.
double predict_unfused_microseconds(GemmProblem const& problem, float operand_bytes = 0.0f,
                                    std::optional<double> compiled_work = {}, bool has_bias = false,
                                    int64_t alignment = kOperandAlignment);

// Of such a kernel over a matrix of 16 bits or of fp32, by specialized_cost_of(Program): behind 63 products of 16 bits
// it was 1.0 to 1.4e-6 us.
constexpr double kMicrosecondsPerElementAndFastOp = 1.15e-6;
constexpr double kMicrosecondsPerElementAndAccurateOp = 1.2e-6;
// Of torch.compile's, by generated_cost_of(Program): what its kernels took beyond torch.mm behind 42 products of 16
// bits, of which the median is 1.05 where they were bound by instructions.
constexpr double kMicrosecondsPerElementAndGeneratedOp = 1.05e-6;

constexpr double kPassLaunch = 1.9;  // of a kernel over a matrix, behind the one that stores it

// A kernel over a matrix that has a program compiled in. bytes and work, in microseconds: of each element.
double predict_pass_microseconds(double elements, double bytes, double work);

// What it takes to read or write so many bytes behind the kernel that stores them. The difference of two such times is
// what bytes more add to a kernel.
double predict_memory_microseconds(double bytes);

// cuBLAS's three products of a trained layer, forwards and backwards. as_tf32: fp32 products run on tensor cores.
double predict_training_products(GemmProblem const& problem, bool as_tf32);

// The same, and the passes over its result and gradient.
double predict_training_microseconds(GemmProblem const& problem, bool as_tf32);

// What issuing launches takes of the host, and how that counts beside the device's time.

// In microseconds beside an H200: of a fused kernel, of each further launch of a fused plan, of PyTorch's product, and
// what a pass behind that adds.
struct HostTimes {
  double fused;
  double further;
  double product;
  double pass;
  double share;  // of the host's time, which its other work waits for wherever the two are close
};

// input: of the product.
HostTimes host_times(Issuer issuer, DType input);

inline HostTimes host_times(LinearRequest const& request) { return host_times(request.issuer, request.input); }

// What is compared of two ways of computing a layer.
double compared(double device_microseconds, double host_microseconds, LinearRequest const& request);

// A 16-bit layer in a training step of compiled code, by cuBLAS's products: what follows them, forwards and backwards,
// in kernels of ours or in those that torch.compile's compiler makes.

struct TrainedLayer {
  int64_t m;
  int64_t n;
  int64_t k;
  float forward_bytes;   // what passes read and write for each element of the result
  float backward_bytes;  // the same
  float own_cost;        // specialized_cost_of(Program), as kernels of 16 bits compute it
  float generated_cost;  // see generated_cost_of(Program)
  bool sums_columns;     // for the bias's gradient
  int32_t multiprocessors;
  Issuer issuer;
};

// Of the layer's step in microseconds: the device's time, or the host's where it takes longer to issue the launches.
struct StepTimes {
  double own;
  double generated;
};

StepTimes compare_passes(TrainedLayer const& layer);

// Of a layer: x is m by k, and its result m by n.
struct TrainedShape {
  int64_t m;
  int64_t n;
  int64_t k;
};

// Whether the host takes longer to issue the training step of a layer whose products cuBLAS runs, forwards and
// backwards, than the device to run it. as_tf32: fp32 products do so in tf32.
bool training_waits_for_host(TrainedShape const& shape, DType dtype, int32_t multiprocessors, bool as_tf32);

// The same of an MLP that is one node of the autograd graph: of its first layer, both halves of a gate's, and its last.
bool mlp_waits_for_host(TrainedShape const& first, TrainedShape const& last, DType dtype, int32_t multiprocessors,
                        bool as_tf32);

}  // namespace cutfuse
