// A step of an fp32 operand, split in shared memory, in place: 64 columns of a tile's rows as the copy engine left
// them, in two halves of 32 columns, become planes of 64 columns. Rows of 128 bytes are swizzled in both, as wgmma
// wants them. A row's planes lie where its halves were, a third plane behind them.
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

// What a thread has found of split3's range in the rows that it helped to convert.
struct RangeCounts {
  uint32_t found = 0;         // flags of planes
  uint32_t out_of_range = 0;  // elements
  uint32_t absent = 0;        // blocks that were zero, as those past the last row

  __device__ __forceinline__ RangeCounts& operator+=(RangeCounts const& other) {
    found |= other.found;
    out_of_range += other.out_of_range;
    absent += other.absent;
    return *this;
  }
};

// One warpgroup converts a step. Two neighbouring lanes share a row, a half each; the second reads and writes in
// another order, so that the eight lanes that are served at once meet no bank twice. (Four lanes to a row: 7% slower.)
template <SplitPlan plan, int tile_rows>
struct StepConverter {
  static constexpr int kParts = plane_count(plan);
  static constexpr int kThreads = 128;
  static constexpr int kLanesPerRow = 2;
  static constexpr int kRowsAtOnce = kThreads / kLanesPerRow;
  static_assert(tile_rows % kRowsAtOnce == 0, "every thread has a row in each round");
  static constexpr int kHalfBytes = tile_rows * 128;
  static constexpr int kElements = kSplitBlock / kLanesPerRow;

  // A lane's place in the tile.
  struct Lane {
    int row;
    int half;

    // The vector of 16 bytes, in its row of the half, that is the lane's i-th.
    __device__ __forceinline__ int source(int i) const { return i ^ half * 4; }
    // The vector of a plane's row that two of them become.
    __device__ __forceinline__ int target(int i) const { return half * 4 + (i ^ half * 2); }
  };

  // All threads of a warp call it together. thread: of the warpgroup.
  static __device__ __forceinline__ void convert(char* step, float* scales, int thread, RangeCounts& counts) {
    CUTFUSE_NO_UNROLL
    for (int row = thread / kLanesPerRow; row < tile_rows; row += kRowsAtOnce) {
      convert_row(step, scales, {row, thread % kLanesPerRow}, counts);
    }
  }

 private:
  static __device__ __forceinline__ void convert_row(char* step, float* scales, Lane lane, RangeCounts& counts) {
    float elements[kElements];
    load(step, lane, elements);
    uint32_t largest = 0;
    uint32_t lowest_rank = 0xffffffffu;
    CUTFUSE_UNROLL
    for (float element : elements) {
      largest = max(largest, split_math::magnitude_of(element));
      if constexpr (plan == SplitPlan::kSplit3) lowest_rank = min(lowest_rank, split_math::rank_of(element));
    }
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    float const scale = scale_of(largest);
    bool odd = !split_math::is_finite(largest);
    if constexpr (plan == SplitPlan::kSplit3) {
      odd |= split_math::is_extreme(split_math::exponent_of(largest)) || lowest_rank < split_math::lowest_rank(scale);
    }
    if (__any_sync(0xffffffffu, odd)) {
      counts += convert_odd(step, scales, lane);
      return;
    }
    store<true>(step, lane, elements, scale);
    if (lane.half > 0) return;
    scales[lane.row] = scale;
    if (plan == SplitPlan::kSplit3 && largest == 0) ++counts.absent;
  }

  static __device__ __forceinline__ float scale_of(uint32_t largest) {
    return split_math::block_scale<kParts>(split_math::exponent_of(largest));
  }

  static __device__ __forceinline__ void load(char const* step, Lane lane, float (&elements)[kElements]) {
    CUTFUSE_UNROLL
    for (int i = 0; i < kElements / 4; ++i) {
      float4 const loaded =
          *reinterpret_cast<float4 const*>(step + lane.half * kHalfBytes + swizzled(lane.row, lane.source(i)));
      float* const to = elements + i * 4;
      to[0] = loaded.x;
      to[1] = loaded.y;
      to[2] = loaded.z;
      to[3] = loaded.w;
    }
  }

  template <bool finite>
  static __device__ __forceinline__ void store(char* step, Lane lane, float const (&elements)[kElements], float scale) {
    float const up = split_math::reciprocal(scale);
    __syncwarp();  // the row's other lane has read its elements too
    CUTFUSE_UNROLL
    for (int i = 0; i < kElements / 8; ++i) {
      uint32_t words[kParts][4];
      CUTFUSE_UNROLL
      for (int pair = 0; pair < 4; ++pair) {
        float const* const from = elements + i * 8 + pair * 2;
        auto const parts = split_math::split_pair<kParts, finite>(split_math::scale_up<kParts>(from[0], up),
                                                                  split_math::scale_up<kParts>(from[1], up));
        CUTFUSE_UNROLL
        for (int part = 0; part < kParts; ++part) words[part][pair] = parts.words[part];
      }
      char* const to = step + swizzled(lane.row, lane.target(i));
      CUTFUSE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        *reinterpret_cast<uint4*>(to + part * kHalfBytes) =
            make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
      }
    }
  }

  // Where an element of some row is not finite or out of split3's range: looks at every one, and takes the scale of the
  // row's finite ones. It reads them again, so that the usual way needs no registers for this one.
  static __device__ __noinline__ RangeCounts convert_odd(char* step, float* scales, Lane lane) {
    float elements[kElements];
    load(step, lane, elements);
    RangeCounts counts;
    uint32_t largest = 0;
    CUTFUSE_NO_UNROLL
    for (float element : elements) {
      uint32_t const magnitude = split_math::magnitude_of(element);
      if (split_math::is_finite(magnitude)) {
        largest = max(largest, magnitude);
      } else {
        counts.found = kNotFinite | kOutOfRange;
      }
    }
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    int const exponent = split_math::exponent_of(largest);
    float const scale = split_math::block_scale<kParts>(exponent);
    if constexpr (plan == SplitPlan::kSplit3) {
      uint32_t const bound = split_math::lowest_rank(scale);
      CUTFUSE_NO_UNROLL
      for (float element : elements) counts.out_of_range += split_math::rank_of(element) < bound ? 1 : 0;
      uint32_t const of_row = counts.out_of_range + __shfl_xor_sync(0xffffffffu, counts.out_of_range, 1);
      if (of_row >= split_math::kManyInBlock || split_math::is_extreme(exponent)) counts.found |= kOutOfRange;
      if (largest == 0 && lane.half == 0) counts.absent = 1;
    }
    store<false>(step, lane, elements, scale);
    if (lane.half == 0) scales[lane.row] = scale;
    return counts;
  }
};

}  // namespace sm90
}  // namespace cutfuse
