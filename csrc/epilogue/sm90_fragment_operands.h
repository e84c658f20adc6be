// Loads a program's operands for the fragment that a thread holds of a wgmma accumulator.
#pragma once

#include "common/vector_access.h"
#include "epilogue/interpreter.h"
#include "epilogue/program.h"

namespace cutfuse::sm90 {

// Accumulator layout of wgmma m64nNk16 as a thread sees a 64x32 epilogue subtile: two neighbouring columns, then the
// row eight below, then the next group of eight columns.
constexpr int kFragmentSize = 16;
constexpr int kRowsPerFragment = 2;
constexpr int kColumnsPerFragment = kFragmentSize / kRowsPerFragment;
constexpr int kLanesPerRow = 4;
constexpr int kElementsPerGroup = 4;
constexpr int kColumnsPerGroup = 8;
CUTFUSE_HOST_DEVICE constexpr int fragment_row(int i) { return ((i >> 1) & 1) * 8; }
CUTFUSE_HOST_DEVICE constexpr int fragment_column(int i) { return (i >> 2) * 8 + (i & 1); }

struct FragmentPosition {
  int m;
  int n;
  int rows;  // M and N: where the matrix ends
  int columns;
};

namespace detail {

__device__ __forceinline__ float2 load_pair(float const* data) { return *reinterpret_cast<float2 const*>(data); }
__device__ __forceinline__ float2 load_pair(__half const* data) {
  return __half22float2(*reinterpret_cast<__half2 const*>(data));
}
__device__ __forceinline__ float2 load_pair(__nv_bfloat16 const* data) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(data));
}

// One column at a time, with every bound checked. A loop over groups of columns, through whose first elements the
// fragment is rotated, because unrolled its addresses alone would spill beside the accumulators.
template <class T>
__device__ __forceinline__ Fragment<kFragmentSize> load_elements(T const* first, Operand const& operand,
                                                                 FragmentPosition position) {
  Fragment<kFragmentSize> fragment;
  CUTFUSE_NO_UNROLL
  for (int group = 0; group < kFragmentSize / kElementsPerGroup; ++group) {
    CUTFUSE_UNROLL
    for (int i = 0; i < kElementsPerGroup; ++i) {
      int const column = group * kColumnsPerGroup + fragment_column(i);
      bool const inside = position.m + fragment_row(i) < position.rows && position.n + column < position.columns;
      int64_t const offset = fragment_row(i) * operand.strides[1] + column * operand.strides[2];
      fragment.values[i] = inside ? to_float(first[offset]) : 0.0f;
    }
    interpreter::rotate<kElementsPerGroup>(fragment);
  }
  return fragment;
}

// Two neighbouring columns in one load, all of them in flight at once.
template <class T>
__device__ __forceinline__ Fragment<kFragmentSize> load_pairs(T const* upper, int64_t row_stride) {
  T const* const lower = upper + fragment_row(2) * row_stride;
  Fragment<kFragmentSize> fragment;
  CUTFUSE_UNROLL
  for (int i = 0; i < kFragmentSize; i += 2) {
    float2 const pair = load_pair((fragment_row(i) == 0 ? upper : lower) + fragment_column(i));
    fragment.values[i] = pair.x;
    fragment.values[i + 1] = pair.y;
  }
  return fragment;
}

template <class T>
__device__ __forceinline__ Fragment<kFragmentSize> load_fragment(Operand const& operand, FragmentPosition position) {
  T const* const first =
      static_cast<T const*>(operand.data) + position.m * operand.strides[1] + position.n * operand.strides[2];
  bool const whole = position.m + fragment_row(2) < position.rows &&
                     position.n + fragment_column(kFragmentSize - 1) < position.columns;
  bool const aligned = operand.strides[1] % 2 == 0 && reinterpret_cast<uintptr_t>(first) % (2 * sizeof(T)) == 0;
  if (operand.strides[2] == 1 && whole && aligned) {
    return load_pairs(first, operand.strides[1]);
  }
  return load_elements(first, operand, position);
}

}  // namespace detail

// The interpreter's operand loader.
struct FragmentOperands {
  Operands const* operands;
  FragmentPosition position;

  __device__ __forceinline__ Fragment<kFragmentSize> operator()(int index) const {
    Operand const& operand = operands->items[index];
    switch (operand.dtype) {
      case DType::kFloat16:
        return detail::load_fragment<__half>(operand, position);
      case DType::kBFloat16:
        return detail::load_fragment<__nv_bfloat16>(operand, position);
      default:
        return detail::load_fragment<float>(operand, position);
    }
  }
};

}  // namespace cutfuse::sm90
