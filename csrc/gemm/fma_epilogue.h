// What the fp32 kernels on CUDA cores do with a fragment of z: bias, program and stores. A thread holds the elements
// that a thread of wgmma holds, so that the programs of all GEMM kernels are the same.
#pragma once

#include <cstdint>

#include "epilogue/sm90_epilogue_function.h"
#include "epilogue/sm90_pre_activation.h"
#include "gemm/fma_operand_copy.h"

namespace cutfuse::fma {

struct Params {
  sm90::EpilogueParams epilogue;  // with M and N
  OperandMatrix x;
  OperandMatrix weight;
  float const* bias;  // [N]; null for none
  float* result;      // [M, N] contiguous
  int k;
  int tiles_m;
  int tiles_n;
  bool raster_along_m;
};

using EpilogueFragment = Fragment<sm90::kFragmentSize>;

__device__ __forceinline__ void add_bias(float const* bias, int n, int columns, EpilogueFragment& z) {
  CUTFUSE_UNROLL
  for (int i = 0; i < sm90::kFragmentSize; ++i) {
    int const column = n + sm90::fragment_column(i);
    if (column < columns) z.values[i] += bias[column];
  }
}

template <int count>
__device__ __forceinline__ void store_fragment(float* matrix, int rows, int columns, int m, int n,
                                               EpilogueFragment const& values) {
  bool const in_pairs = columns % 2 == 0 && reinterpret_cast<uintptr_t>(matrix) % sizeof(float2) == 0;  // n is even
  CUTFUSE_UNROLL
  for (int i = 0; i < count; i += 2) {
    int const row = m + sm90::fragment_row(i);
    int const column = n + sm90::fragment_column(i);
    if (row >= rows || column >= columns) continue;
    float* const to = matrix + static_cast<int64_t>(row) * columns + column;
    if (in_pairs) {
      *reinterpret_cast<float2*>(to) = make_float2(values.values[i], values.values[i + 1]);
    } else {
      to[0] = values.values[i];
      if (column + 1 < columns) to[1] = values.values[i + 1];
    }
  }
}

// m, n: of the thread's first element. count: how many of the elements are the thread's own; the others are not stored.
template <int count = sm90::kFragmentSize>
__device__ __forceinline__ void finish_fragment(Params const& params, sm90::EpilogueParams const* epilogue, int m,
                                                int n, EpilogueFragment& z) {
  int const rows = params.epilogue.rows;
  int const columns = params.epilogue.columns;
  if (params.bias != nullptr) add_bias(params.bias, n, columns, z);
  void* const pre_activation = sm90::pre_activation_of(epilogue);
  if (pre_activation != nullptr) store_fragment<count>(static_cast<float*>(pre_activation), rows, columns, m, n, z);
  EpilogueFragment const y = sm90::run_epilogue<AccuratePrimitives>(epilogue, m, n, z);
  store_fragment<count>(params.result, rows, columns, m, n, y);
}

}  // namespace cutfuse::fma
