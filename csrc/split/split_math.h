// The arithmetic of splitting: the scale of a block, the parts of an element, and whether an element is out of range.
// `parts` tells the scheme: two fp16 parts (split3) or three bf16 parts (split6).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "common/host_device.h"
#include "split/planes.h"

namespace cutfuse::split_math {

constexpr uint32_t kInfinity = 0x7f800000u;  // the bits of infinity; those of NaN are larger

// split3 is refused if a block has this many out-of-range elements, or if more than 1 in kRareFraction of all elements
// are. The limit of a block is higher where rows share scales, because a block's own elements may be smaller than those
// that set the scale: of a million blocks of normal elements, 2^-6 the size of the largest, some have four out of
// range.
constexpr uint32_t many_in_block(bool shares_scale) { return shares_scale ? 8 : 4; }
constexpr int kRareFraction = 256;

// Bounds of the exponent of a block's largest magnitude. A product of two scales is then at least 2^-148, which fp32
// represents as a denormal number.
constexpr int kSafeExponent = 60;

// The bits of |x|. Compared as integers, they have the order of the values, with infinity and NaN above all others.
__device__ __forceinline__ uint32_t magnitude_of(float x) { return to_bits(x) & 0x7fffffffu; }

__device__ __forceinline__ bool is_finite(uint32_t magnitude) { return magnitude < kInfinity; }

// exponent in [-126, 127]
__device__ __forceinline__ float power_of_two(int exponent) {
  return from_bits<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// The exact reciprocal of a power of two in [2^-126, 2^126].
__device__ __forceinline__ float reciprocal(float power) { return from_bits<float>(0x7f000000u - to_bits(power)); }

// floor(log2) of a block's largest magnitude; 0 for zero. It is -127 for every denormal number, which is below all
// bounds that the exponent is compared with.
__device__ __forceinline__ int exponent_of(uint32_t magnitude) {
  return magnitude == 0 ? 0 : static_cast<int>(magnitude >> 23) - 127;
}

// The scale of a block: its elements are its parts times the scale, and parts are made from elements times the
// reciprocal. The exponent is clamped, so that the scale and its reciprocal are normal numbers.
template <int parts>
__device__ __forceinline__ float block_scale(int exponent) {
  constexpr int kTop = parts == 2 ? 14 : 0;  // the exponent of a scaled block's largest magnitude
  constexpr int kLowest = parts == 2 ? -112 : -116;
  constexpr int kHighest = parts == 2 ? 127 : 116;
  int const clamped = exponent < kLowest ? kLowest : (exponent > kHighest ? kHighest : exponent);
  return power_of_two(clamped - kTop);
}

// An element times the reciprocal of its block's scale. In split6, an element that is not zero keeps a high part that
// is not zero, at least bf16's smallest number, so that its product with an infinity is infinite and not NaN.
template <int parts>
__device__ __forceinline__ float scale_up(float x, float up) {
  float const scaled = x * up;
  if constexpr (parts == 3) {
    constexpr uint32_t kLeast = 0x00010000u;  // 2^-133
    if (magnitude_of(scaled) < kLeast && magnitude_of(x) != 0)
      return from_bits<float>((to_bits(x) & 0x80000000u) | kLeast);
  }
  return scaled;
}

// Whether a block's scale alone makes split3 unsafe.
__device__ __forceinline__ bool is_extreme(int exponent) {
  return exponent < -kSafeExponent || exponent > kSafeExponent;
}

// Split3 keeps fewer than 22 bits of an x that is not zero and that the scale takes below 2^-3: its low part is then a
// multiple of 2^-24, fp16's smallest number, and is rounded with an error of up to 2^-25. Such an x has a rank_of()
// below lowest_rank() of its scale. Subtracting 1 wraps zero around to the highest rank, so that it is in range.
__device__ __forceinline__ uint32_t rank_of(float x) { return magnitude_of(x) - 1u; }
__device__ __forceinline__ uint32_t lowest_rank(float scale) { return rank_of(scale * 0x1p-3f); }

// Converts two elements to one 16-bit part each. The first is in the lower half of the word.
template <int parts>
__device__ __forceinline__ uint32_t round_pair(float first, float second) {
  uint32_t word;
  if constexpr (parts == 2) {
    __half2 const pair = __floats2half2_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  } else {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

// Element `index` of a pair.
template <int parts>
__device__ __forceinline__ float widen(uint32_t word, int index) {
  if constexpr (parts == 3) {
    return from_bits<float>(index == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    __half2 pair;
    memcpy(&pair, &word, sizeof(word));
    return index == 0 ? __low2float(pair) : __high2float(pair);
  }
}

template <int parts>
struct PairParts {
  uint32_t words[parts];  // high, middle in three parts, low
};

// Splits two scaled elements. Only the high part of an infinity or NaN is nonzero. `finite`: the caller guarantees that
// there are none.
template <int parts, bool finite = false>
__device__ __forceinline__ PairParts<parts> split_pair(float first, float second) {
  float rest[2] = {first, second};
  PairParts<parts> result;
  result.words[0] = round_pair<parts>(first, second);
  CUTFUSE_UNROLL
  for (int part = 1; part < parts; ++part) {
    CUTFUSE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float const error =
          rest[i] - widen<parts>(result.words[part - 1], i);  // exact; NaN where the element is not finite
      rest[i] = finite || part > 1 || error == error ? error : 0.0f;
    }
    result.words[part] = round_pair<parts>(rest[0], rest[1]);
  }
  return result;
}

}  // namespace cutfuse::split_math
