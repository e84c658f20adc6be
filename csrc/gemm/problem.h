// What a fused GEMM is asked to do: y[M,N] = program(a[M,K] @ b[N,K]^T + bias[N], operands), or its rows reduced.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "epilogue/program.h"

namespace cutfuse {

// Everything that the choice of a kernel depends on, and no pointer.
struct GemmProblem {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t lda;  // elements between rows of a and of b; rows themselves are contiguous
  int64_t ldb;
  DType input;          // of a, b and bias; fp32 operands are multiplied as tf32
  DType output;         // of the stored matrix; partials of a row reduction are always fp32
  Reduction reduction;  // kNone stores the matrix, anything else one partial state per row and N tile
  int32_t multiprocessors;
  float epilogue_cost;  // see cost_of(Program)
};

struct GemmBuffers {
  void const* a;
  void const* b;
  void const* bias;  // null for none
  void* d;           // [M,N] contiguous; unused by a row reduction
  float* partials;   // [N tiles, M] states of partial_width(reduction) floats; unused by a store
};

std::string describe(GemmProblem const& problem);

}  // namespace cutfuse
