// A step of an fp32 operand, split in shared memory, in place: 64 columns of a tile's rows as the copy engine left
// them, in two halves of 32 columns, become planes of 64 columns. Rows of 128 bytes are swizzled in both, as wgmma
// wants them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/macros.h"
#include "split/planes.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

// Where 16 bytes of a row lie in a tile of 128-byte rows that begins at a multiple of 1024 bytes.
__device__ __forceinline__ int swizzled(int row, int sixteen_bytes) {
  return row * 128 + (sixteen_bytes ^ row % 8) * 16;
}

// A thread's share, between its read and its write: eight lanes hold a row, each four columns of either half.
template <SplitPlan plan, int tile_rows>
struct ConvertedStep {
  static constexpr int kParts = plane_count(plan);
  static constexpr int kThreads = 256;
  static constexpr int kLanesPerRow = 8;
  static constexpr int kRowsAtOnce = kThreads / kLanesPerRow;
  static constexpr int kRows = tile_rows / kRowsAtOnce;
  static constexpr int kHalfBytes = tile_rows * 128;

  uint32_t words[kRows][2][2][kParts];  // row, half, pair of columns, plane
  float scales[kRows];
  uint32_t found = 0;  // flags of planes
  // The same for all lanes of a row: of the lane's rows, the elements out of split3's range, and how many are zero.
  uint32_t out_of_range = 0;
  uint32_t absent = 0;

  ConvertedStep() = default;

  // All threads of a warp call it together.
  __device__ __forceinline__ ConvertedStep(char const* step, int thread) {
    char const* const from = step + swizzled(thread / kLanesPerRow, thread % kLanesPerRow);
    uint32_t counts = 0;
    CUTFUSE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float4 values[2];
      CUTFUSE_UNROLL
      for (int half = 0; half < 2; ++half) {
        values[half] = *reinterpret_cast<float4 const*>(from + half * kHalfBytes + i * kRowsAtOnce * 128);
      }
      counts += convert(i, values) << 8 * i;
    }
    if constexpr (plan == SplitPlan::kSplit3) count(counts);
  }

  __device__ __forceinline__ void store(char* step, float* tile_scales, int thread) const {
    int const lane = thread % kLanesPerRow;
    int const row = thread / kLanesPerRow;
    char* const first = step + swizzled(row, lane / 2) + lane % 2 * 8;
    char* const second = step + swizzled(row, 4 + lane / 2) + lane % 2 * 8;
    CUTFUSE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTFUSE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        CUTFUSE_UNROLL
        for (int half = 0; half < 2; ++half) {
          char* const to = (half == 0 ? first : second) + part * kHalfBytes + i * kRowsAtOnce * 128;
          *reinterpret_cast<uint2*>(to) = make_uint2(words[i][half][0][part], words[i][half][1][part]);
        }
      }
      if (lane == 0) tile_scales[row + i * kRowsAtOnce] = scales[i];
    }
  }

 private:
  // Splits a row's elements; returns how many of the lane's are out of range.
  __device__ __forceinline__ uint32_t convert(int i, float4 const (&values)[2]) {
    float const elements[8] = {values[0].x, values[0].y, values[0].z, values[0].w,
                               values[1].x, values[1].y, values[1].z, values[1].w};
    uint32_t largest = 0;
    CUTFUSE_UNROLL
    for (float element : elements) largest = max(largest, split_math::magnitude_of(element));
    if (!split_math::is_finite(largest)) {
      found |= plan == SplitPlan::kSplit3 ? kNotFinite | kOutOfRange : kNotFinite;
      largest = 0;
      CUTFUSE_UNROLL
      for (float element : elements) {
        uint32_t const magnitude = split_math::magnitude_of(element);
        if (split_math::is_finite(magnitude)) largest = max(largest, magnitude);
      }
    }
    CUTFUSE_UNROLL
    for (int lanes = kLanesPerRow / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    if (largest == 0) ++absent;
    int const exponent = split_math::exponent_of(largest);
    float const scale = split_math::block_scale<kParts>(exponent);
    float const up = split_math::reciprocal(scale);
    scales[i] = scale;
    uint32_t outside = 0;
    if constexpr (plan == SplitPlan::kSplit3) {
      if (split_math::is_extreme(exponent)) found |= kOutOfRange;
      uint32_t const bound = split_math::lowest_rank(scale);
      CUTFUSE_UNROLL
      for (float element : elements) outside += split_math::rank_of(element) < bound ? 1 : 0;
    }
    CUTFUSE_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      auto const parts = split_math::split_pair<kParts>(elements[2 * pair] * up, elements[2 * pair + 1] * up);
      CUTFUSE_UNROLL
      for (int part = 0; part < kParts; ++part) words[i][pair / 2][pair % 2][part] = parts.words[part];
    }
    return outside;
  }

  // counts: a byte for each row.
  __device__ __forceinline__ void count(uint32_t counts) {
    static_assert(kRows == 4 && split_math::kManyInBlock == 4, "bytes of a word, and the mask of those that reach 4");
    CUTFUSE_UNROLL
    for (int lanes = kLanesPerRow / 2; lanes > 0; lanes /= 2) counts += __shfl_xor_sync(0xffffffffu, counts, lanes);
    if ((counts & 0xfcfcfcfcu) != 0) found |= kOutOfRange;
    out_of_range = __dp4a(counts, 0x01010101u, 0u);
  }
};

}  // namespace sm90
}  // namespace cutfuse
