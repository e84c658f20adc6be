// Brings the operands that are rows, columns or single elements to shared memory, once for a tile.
#pragma once

#include "epilogue/sm90_epilogue_function.h"

namespace cutfuse::sm90 {

namespace detail {

// An element's bits as they lie in memory. Without a branch, so that the loads of all operands are in flight at once.
__device__ __forceinline__ uint32_t load_bits(void const* data, int64_t offset, bool is_wide, bool exists) {
  uint32_t bits = 0;
  if (exists && is_wide) bits = static_cast<uint32_t const*>(data)[offset];
  if (exists && !is_wide) bits = static_cast<uint16_t const*>(data)[offset];
  return bits;
}

__device__ __forceinline__ float element_of_bits(uint32_t bits, DType dtype) {
  float const from_half = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  float const wide = __uint_as_float(dtype == DType::kBFloat16 ? bits << 16 : bits);
  return dtype == DType::kFloat16 ? from_half : wide;
}

}  // namespace detail

// Elements outside the matrix are 0. The kernel's text says by the mark that it stages operands (see
// specialize/kernel_text.h): behind an instruction, as lines of comments alone are left out of embedded text.
template <int threads, int extent>
__device__ __forceinline__ void stage_operands(EpilogueParams const& params, EpilogueStorage<extent>& storage,
                                               int tile_m, int tile_n, int thread) {
  uint32_t rows = params.staged_rows;
  uint32_t const columns = params.staged_columns;
  asm volatile("mov.b32 %0, %0; // operands are staged" : "+r"(rows));
  if (rows == 0 && columns == 0) return;
  constexpr int kElements = (extent + threads - 1) / threads;
  uint32_t bits[kMaxOperands][kElements];
  CUTFUSE_UNROLL
  for (int k = 0; k < kMaxOperands; ++k) {
    Operand const& operand = params.operands.items[k];
    bool const is_row = (rows >> k & 1) != 0;
    bool const is_column = (columns >> k & 1) != 0;
    int const size = is_row ? params.tile_columns : params.tile_rows;
    int const first = (is_row ? tile_n : tile_m) * size;
    int const count = min(size, (is_row ? params.columns : params.rows) - first);
    int64_t const stride = operand.strides[is_row ? 2 : 1];
    CUTFUSE_UNROLL
    for (int j = 0; j < kElements; ++j) {
      int const i = thread + j * threads;
      bool const exists = (is_row || is_column) && i < count;
      bits[k][j] = detail::load_bits(operand.data, (first + i) * stride, operand.dtype == DType::kFloat32, exists);
    }
  }
  CUTFUSE_UNROLL
  for (int k = 0; k < kMaxOperands; ++k) {
    CUTFUSE_UNROLL
    for (int j = 0; j < kElements; ++j) {
      int const i = thread + j * threads;
      if (i < extent) storage.staged[k][i] = detail::element_of_bits(bits[k][j], params.operands.items[k].dtype);
    }
  }
}

}  // namespace cutfuse::sm90
