// How long cuBLAS's products and the kernels behind them take, predicted: in microseconds, fitted to an H200.
#pragma once

#include <optional>

#include "plan/gemm_problem.h"

namespace cutfuse {

// The alternative: cuBLAS, then one pointwise or reduction kernel over its result. A product over planes or by fused
// multiply-adds is compared with cuBLAS in fp32, whose kernels a bias decides. compiled_work: the microseconds that an
// element takes of a kernel that has the program compiled in; empty for one that interprets it.
double predict_unfused_microseconds(GemmProblem const& problem, float operand_bytes = 0.0f,
                                    std::optional<double> compiled_work = {}, bool has_bias = false);

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

}  // namespace cutfuse
