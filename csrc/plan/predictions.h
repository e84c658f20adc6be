// How long kernels take, predicted: in microseconds, fitted to measurements on an H200.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/gemm_configs.h"

namespace cutfuse {

// What an epilogue reads for each element of the result: see LinearRequest.
struct OperandBytes {
  float all = 0.0f;
  float fetched = 0.0f;
};

// One kernel of the table, with K in so many slices.
double predict_microseconds(GemmConfig const& config, GemmProblem const& problem, int slices,
                            OperandBytes operand_bytes = {});

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

// One pass that splits an fp32 matrix into planes.
double predict_split_microseconds(int64_t rows, int64_t columns);

}  // namespace cutfuse
