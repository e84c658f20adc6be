// How long cuBLAS's products and the kernels behind them take, predicted: in microseconds, fitted to an H200.
#pragma once

#include <optional>

#include "plan/gemm_problem.h"

namespace cutfuse {

// The alternative: cuBLAS, then one pointwise or reduction kernel over its result. A product over planes or by fused
// multiply-adds is compared with cuBLAS in fp32, whose kernels a bias decides. compiled_cost: see
// specialized_cost_of(Program), of a kernel that has the program compiled in; empty for one that interprets it.
double predict_unfused_microseconds(GemmProblem const& problem, float operand_bytes = 0.0f,
                                    std::optional<float> compiled_cost = {}, bool has_bias = false);

constexpr double kPassLaunch = 2.9;  // of a kernel over a matrix

// A kernel over a matrix of 16 bits that has a program compiled in. bytes and cost: of each element.
double predict_pass_microseconds(double elements, double bytes, double cost);

// What so many bytes more, read or written, add to a kernel of torch.compile's.
double predict_memory_microseconds(double bytes);

// cuBLAS's three products of a trained layer, forwards and backwards. as_tf32: fp32 products run on tensor cores.
double predict_training_products(GemmProblem const& problem, bool as_tf32);

// The same, and the passes over its result and gradient.
double predict_training_microseconds(GemmProblem const& problem, bool as_tf32);

}  // namespace cutfuse
