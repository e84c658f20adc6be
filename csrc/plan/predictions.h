// How long kernels take, predicted: in microseconds, fitted to measurements on an H200.
#pragma once

#include <cstdint>

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

// Reading x and the weight once from memory.
double predict_reading_microseconds(GemmProblem const& problem);

// How many more cache lines a tile's rows of 128 bytes touch where the rows of x and the weight do not begin at
// multiples of 128 bytes: 0 to 7/8 of a line. The copy engine asks the L2 for each line.
double further_lines(GemmProblem const& problem);

constexpr double kTf32Factor = 2.05;  // what a product takes in tf32 for one of 16 bits and as much of K

// One pass that splits an fp32 matrix into planes.
double predict_split_microseconds(int64_t rows, int64_t columns);

}  // namespace cutfuse
