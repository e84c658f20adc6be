// Element types on the device, 16-byte vectors of them, and their conversion to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/host_device.h"

namespace cutfuse {

template <class T>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
struct TypeTag {
  using type = T;
};

// Calls function(TypeTag<T>{}) for the element type that `dtype` stands for.
template <class Function>
auto dispatch_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function(TypeTag<__half>{});
    case DType::kBFloat16:
      return function(TypeTag<__nv_bfloat16>{});
    default:
      return function(TypeTag<float>{});
  }
}

CUTFUSE_HOST_DEVICE float to_float(float x) { return x; }
CUTFUSE_HOST_DEVICE float to_float(__half x) { return __half2float(x); }
CUTFUSE_HOST_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// N elements as they lie in memory, 8 or 16 bytes: 16-bit elements take half the registers that they take in fp32.
template <class T, int N = kVectorSize<T>>
struct Vector {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords == 2 || kWords == 4, "one load of a thread");
  uint32_t words[kWords];
};

// Element `index` in fp32; the index has to be known at compile time after unrolling.
template <class T, int N>
CUTFUSE_HOST_DEVICE float element(Vector<T, N> const& vector, int index) {
  if constexpr (std::is_same_v<T, float>) {
    return from_bits<float>(vector.words[index]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // a bf16 is the upper half of an fp32
    uint32_t const word = vector.words[index / 2];
    return from_bits<float>(index % 2 == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    float2 const pair = __half22float2(__half2(from_bits<__half2_raw>(vector.words[index / 2])));
    return index % 2 == 0 ? pair.x : pair.y;
  }
}

template <class T, int N>
CUTFUSE_HOST_DEVICE void unpack(Vector<T, N> const& vector, float* values) {
  CUTFUSE_UNROLL
  for (int i = 0; i < N; ++i) values[i] = element(vector, i);
}

template <class T, int N>
CUTFUSE_HOST_DEVICE void pack(float const* values, Vector<T, N>& vector) {
  CUTFUSE_UNROLL
  for (int i = 0; i < Vector<T, N>::kWords; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      vector.words[i] = to_bits(values[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      vector.words[i] = to_bits(__nv_bfloat162_raw(__floats2bfloat162_rn(values[2 * i], values[2 * i + 1])));
    } else {
      vector.words[i] = to_bits(__half2_raw(__floats2half2_rn(values[2 * i], values[2 * i + 1])));
    }
  }
}

#if defined(__CUDACC__)

template <class T, int N = kVectorSize<T>>
__device__ __forceinline__ Vector<T, N> load_vector(T const* pointer) {
  if constexpr (Vector<T, N>::kWords == 4) {
    uint4 const loaded = *reinterpret_cast<uint4 const*>(pointer);
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
  } else {
    uint2 const loaded = *reinterpret_cast<uint2 const*>(pointer);
    return {{loaded.x, loaded.y}};
  }
}

__device__ __forceinline__ void prefetch_to_l2(void const* pointer) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
#endif
}

template <class T, int N>
__device__ __forceinline__ void store_vector(T* pointer, Vector<T, N> const& vector) {
  if constexpr (Vector<T, N>::kWords == 4) {
    *reinterpret_cast<uint4*>(pointer) = make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]);
  } else {
    *reinterpret_cast<uint2*>(pointer) = make_uint2(vector.words[0], vector.words[1]);
  }
}

__device__ __forceinline__ void store_element(float* pointer, float value) { *pointer = value; }
__device__ __forceinline__ void store_element(__half* pointer, float value) { *pointer = __float2half_rn(value); }
__device__ __forceinline__ void store_element(__nv_bfloat16* pointer, float value) {
  *pointer = __float2bfloat16_rn(value);
}

__device__ __forceinline__ void store_element(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kFloat16:
      return store_element(static_cast<__half*>(data) + index, value);
    case DType::kBFloat16:
      return store_element(static_cast<__nv_bfloat16*>(data) + index, value);
    default:
      return store_element(static_cast<float*>(data) + index, value);
  }
}

#endif

// Elements from here to the next 16-byte boundary.
template <class T>
CUTFUSE_HOST_DEVICE int elements_to_boundary(T const* data) {
  return static_cast<int>((kVectorBytes - reinterpret_cast<uintptr_t>(data) % kVectorBytes) % kVectorBytes / sizeof(T));
}

}  // namespace cutfuse
