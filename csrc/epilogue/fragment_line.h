// A thread's fragment as a line of elements through a tensor of (outer, rows, columns), and its loads and stores. The
// element types, strides and alignments are known at run time only, as for the operands of a program.
#pragma once

#include "common/vector_access.h"
#include "epilogue/interpreter.h"
#include "epilogue/program.h"

namespace cutfuse {

// Elements of the widest load of a line: 16 bytes of fp32.
constexpr int kLineVector = 4;

enum LineDimension : int32_t { kAlongRows = 1, kAlongColumns = 2 };

struct FragmentLine {
  int64_t outer;  // coordinates of the first element
  int64_t row;
  int64_t column;
  LineDimension dimension;
  int32_t shift;  // 2^shift neighbours, then a jump to `step` further than the first of them
  int32_t step;
  int32_t count;  // elements this far along the dimension or further are outside the tensor; at least 1

  CUTFUSE_HOST_DEVICE int offset(int i) const { return (i >> shift) * step + (i & ((1 << shift) - 1)); }
};

// A line's count where `room` elements follow, which may be more than an int holds.
CUTFUSE_HOST_DEVICE int32_t count_within(int64_t room) {
  return room < (1 << 30) ? static_cast<int32_t>(room) : 1 << 30;
}

// A tensor that a kernel writes.
struct Output {
  void* data;
  int64_t strides[3];
  DType dtype;
};

namespace detail {

template <class Tensor>
CUTFUSE_HOST_DEVICE int64_t line_start(Tensor const& tensor, FragmentLine const& line) {
  return line.outer * tensor.strides[0] + line.row * tensor.strides[1] + line.column * tensor.strides[2];
}

template <int F>
CUTFUSE_HOST_DEVICE bool takes_vectors(void const* start, size_t element_size, int64_t stride,
                                       FragmentLine const& line) {
  return stride == 1 && line.shift >= 2 && line.offset(F - 1) < line.count &&
         reinterpret_cast<uintptr_t>(start) % (kLineVector * element_size) == 0;
}

}  // namespace detail

#if defined(__CUDACC__)

namespace detail {

template <int F, class T>
__device__ __forceinline__ Fragment<F> load_line(T const* start, int64_t stride, FragmentLine const& line) {
  Fragment<F> fragment;
  if (stride == 0) {
    interpreter::fill(fragment, to_float(*start));
  } else if (takes_vectors<F>(start, sizeof(T), stride, line)) {
    Vector<T, kLineVector> loaded[F / kLineVector];
    CUTFUSE_UNROLL
    for (int i = 0; i < F / kLineVector; ++i) {
      loaded[i] = load_vector<T, kLineVector>(start + line.offset(i * kLineVector));
    }
    CUTFUSE_UNROLL
    for (int i = 0; i < F / kLineVector; ++i) unpack(loaded[i], fragment.values + i * kLineVector);
  } else {
    CUTFUSE_UNROLL
    for (int i = 0; i < F; ++i) {
      fragment.values[i] = line.offset(i) < line.count ? to_float(start[line.offset(i) * stride]) : 0.0f;
    }
  }
  return fragment;
}

template <int F, class T>
__device__ __forceinline__ void store_line(T* start, int64_t stride, FragmentLine const& line,
                                           Fragment<F> const& fragment) {
  if (takes_vectors<F>(start, sizeof(T), stride, line)) {
    CUTFUSE_UNROLL
    for (int i = 0; i < F / kLineVector; ++i) {
      Vector<T, kLineVector> packed;
      pack(fragment.values + i * kLineVector, packed);
      store_vector(start + line.offset(i * kLineVector), packed);
    }
  } else {
    CUTFUSE_UNROLL
    for (int i = 0; i < F; ++i) {
      if (line.offset(i) < line.count) store_element(start + line.offset(i) * stride, fragment.values[i]);
    }
  }
}

}  // namespace detail

// Elements outside the tensor are 0.
template <int F>
__device__ __forceinline__ Fragment<F> load_line(Operand const& operand, FragmentLine const& line) {
  int64_t const start = detail::line_start(operand, line);
  int64_t const stride = operand.strides[line.dimension];
  switch (operand.dtype) {
    case DType::kFloat16:
      return detail::load_line<F>(static_cast<__half const*>(operand.data) + start, stride, line);
    case DType::kBFloat16:
      return detail::load_line<F>(static_cast<__nv_bfloat16 const*>(operand.data) + start, stride, line);
    default:
      return detail::load_line<F>(static_cast<float const*>(operand.data) + start, stride, line);
  }
}

// Elements outside the tensor are dropped.
template <int F>
__device__ __forceinline__ void store_line(Output const& output, FragmentLine const& line,
                                           Fragment<F> const& fragment) {
  int64_t const start = detail::line_start(output, line);
  int64_t const stride = output.strides[line.dimension];
  switch (output.dtype) {
    case DType::kFloat16:
      return detail::store_line(static_cast<__half*>(output.data) + start, stride, line, fragment);
    case DType::kBFloat16:
      return detail::store_line(static_cast<__nv_bfloat16*>(output.data) + start, stride, line, fragment);
    default:
      return detail::store_line(static_cast<float*>(output.data) + start, stride, line, fragment);
  }
}

// The program's operands along a line, as the interpreter asks for them.
template <int F>
struct LoadLineOperand {
  Operands const* operands;
  FragmentLine line;

  __device__ __forceinline__ Fragment<F> operator()(int index) const {
    return load_line<F>(operands->items[index], line);
  }
};

#endif

}  // namespace cutfuse
