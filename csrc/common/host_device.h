// What host and device code share: qualifiers that vanish for a plain C++ compiler, so that one source of the epilogue
// formulas runs everywhere, and the bits of numbers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define CUTFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#define CUTFUSE_UNROLL _Pragma("unroll")
#define CUTFUSE_NO_UNROLL _Pragma("unroll 1")
#else
#define CUTFUSE_HOST_DEVICE inline
#define CUTFUSE_UNROLL
#define CUTFUSE_NO_UNROLL
#endif

namespace cutfuse {

template <class Value>
CUTFUSE_HOST_DEVICE Value from_bits(uint32_t bits) {
  static_assert(sizeof(Value) == sizeof(bits), "one word");
  Value value;
  memcpy(&value, &bits, sizeof(bits));
  return value;
}

template <class Value>
CUTFUSE_HOST_DEVICE uint32_t to_bits(Value value) {
  static_assert(sizeof(Value) == sizeof(uint32_t), "one word");
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace cutfuse
