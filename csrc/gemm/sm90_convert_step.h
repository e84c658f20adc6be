// A step of an fp32 operand, split in shared memory, in place: 64 columns of a tile's rows as the copy engine left
// them, in two halves of 32 columns, become planes of 64 columns. Rows of 128 bytes are swizzled in both, as wgmma
// wants them. A row's planes lie where its halves were, a third plane behind them.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cstdint>

#include "common/macros.h"
#include "gemm/sm90_named_barriers.h"
#include "split/planes.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

// What a thread has found of split3's range in the rows that it helped to convert.
struct RangeCounts {
  uint32_t flags = 0;         // of planes
  uint32_t out_of_range = 0;  // elements
  uint32_t absent = 0;        // blocks that were zero, as those past the last row

  __device__ __forceinline__ RangeCounts& operator+=(RangeCounts const& other) {
    flags |= other.flags;
    out_of_range += other.out_of_range;
    absent += other.absent;
    return *this;
  }
};

// What a warpgroup of converters has found, in shared memory; zero at first.
struct RangeFindings {
  uint32_t flags;
  uint32_t out_of_range;  // of the current tile, like the next
  uint32_t absent;

  // Adds what was found in a tile of so many blocks of a row to what was found before; all of the warpgroup call it.
  __device__ __forceinline__ void note(RangeCounts const& counts, int blocks, int thread) {
    constexpr int kThreads = cutlass::NumThreadsPerWarpGroup;
    if (counts.flags != 0) atomicOr(&flags, counts.flags);
    if (counts.out_of_range != 0) atomicAdd(&out_of_range, counts.out_of_range);
    if (counts.absent != 0) atomicAdd(&absent, counts.absent);
    cutlass::arch::NamedBarrier::sync(kThreads, kConvertersBarrier);
    if (thread == 0) {
      int64_t const elements = (int64_t{blocks} - absent) * kSplitBlock;
      if (out_of_range * int64_t{split_math::kRareFraction} > elements) flags |= kOutOfRange;
      out_of_range = absent = 0;
    }
    cutlass::arch::NamedBarrier::sync(kThreads, kConvertersBarrier);
  }
};

// One warpgroup converts a step. Two neighbouring lanes share a row, a half each; the second reads and writes in
// another order, so that the eight lanes that are served at once meet no bank twice. (Four lanes to a row: 7% slower.)
template <SplitPlan plan, int tile_rows>
struct StepConverter {
  static constexpr int kParts = plane_count(plan);
  static constexpr int kThreads = cutlass::NumThreadsPerWarpGroup;
  static constexpr int kLanesPerRow = 2;
  static constexpr int kRowsAtOnce = kThreads / kLanesPerRow;
  static_assert(tile_rows == 2 * kRowsAtOnce, "every thread has two rows");
  static constexpr int kHalfBytes = tile_rows * 128;
  static constexpr int kElements = kSplitBlock / kLanesPerRow;

  // A lane's place in a step. Vectors of 16 bytes are numbered by their place in a row of 128 bytes, which a row's
  // number modulo 8 is added to without carry: so the place of a lane's i-th vector is that of its first with i added.
  struct Lane {
    int step;  // its first byte, a multiple of 1024
    int row;
    int half;

    // Of fp32 elements; the second half's in another order.
    __device__ __forceinline__ int source(int i) const { return (place(half * 4) + half * kHalfBytes) ^ (i * 16); }
    // Of a plane: what two of them become.
    __device__ __forceinline__ int target(int i) const { return place(half * 6) ^ (i * 16); }

   private:
    __device__ __forceinline__ int place(int vector) const { return step + row * 128 + (vector ^ (row % 8)) * 16; }
  };

  // Of a ring of steps, the one that begins at byte `step`. All threads of a warp call it together; thread: of the
  // warpgroup.
  static __device__ __forceinline__ void convert(char* ring, int step, float* scales, int thread, RangeCounts& counts) {
    Lane const first{step, thread / kLanesPerRow, thread % kLanesPerRow};
    Lane const second{step, first.row + kRowsAtOnce, first.half};
    float elements[2][kElements];
    load(ring, first, elements[0]);
    load(ring, second, elements[1]);
    __syncwarp();  // all loads are under way before the first is waited for
    convert_row(ring, scales, first, elements[0], counts);
    convert_row(ring, scales, second, elements[1], counts);
  }

 private:
  static __device__ __forceinline__ void convert_row(char* ring, float* scales, Lane lane,
                                                     float const (&elements)[kElements], RangeCounts& counts) {
    uint32_t largest = 0;
    uint32_t lowest[2] = {0xffffffffu, 0xffffffffu};  // of every other element: a chain half as long
    CUTFUSE_UNROLL
    for (int i = 0; i < kElements; i += 2) {  // doubled, bits lose the sign; one instruction adds and takes the least
      uint32_t const first = split_math::to_bits(elements[i]) * 2;
      uint32_t const second = split_math::to_bits(elements[i + 1]) * 2;
      largest = __vimax3_u32(largest, first, second);
      if constexpr (plan == SplitPlan::kSplit3) {
        lowest[0] = min(lowest[0], first - 1);
        lowest[1] = min(lowest[1], second - 1);
      }
    }
    uint32_t const lowest_rank = min(lowest[0], lowest[1]) / 2;
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1)) / 2;
    float const scale = scale_of(largest);
    bool odd = !split_math::is_finite(largest);
    if constexpr (plan == SplitPlan::kSplit3) {
      odd |= split_math::is_extreme(split_math::exponent_of(largest)) || lowest_rank < split_math::lowest_rank(scale);
    }
    if (__any_sync(0xffffffffu, odd)) {
      counts += convert_odd(ring, scales, lane);
      return;
    }
    store<true>(ring, lane, elements, scale);
    if (lane.half > 0) return;
    scales[lane.row] = scale;
    if (plan == SplitPlan::kSplit3 && largest == 0) ++counts.absent;
  }

  static __device__ __forceinline__ float scale_of(uint32_t largest) {
    return split_math::block_scale<kParts>(split_math::exponent_of(largest));
  }

  static __device__ __forceinline__ void load(char const* ring, Lane lane, float (&elements)[kElements]) {
    CUTFUSE_UNROLL
    for (int i = 0; i < kElements / 4; ++i) {
      float4 const loaded = *reinterpret_cast<float4 const*>(ring + lane.source(i));
      float* const to = elements + i * 4;
      to[0] = loaded.x;
      to[1] = loaded.y;
      to[2] = loaded.z;
      to[3] = loaded.w;
    }
  }

  template <bool finite>
  static __device__ __forceinline__ void store(char* ring, Lane lane, float const (&elements)[kElements], float scale) {
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
      char* const to = ring + lane.target(i);
      CUTFUSE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        *reinterpret_cast<uint4*>(to + part * kHalfBytes) =
            make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
      }
    }
  }

  // Where an element of some row is not finite or out of split3's range: looks at every one, and takes the scale of the
  // row's finite ones. It reads them again, so that the usual way needs no registers for this one.
  static __device__ __noinline__ RangeCounts convert_odd(char* ring, float* scales, Lane lane) {
    float elements[kElements];
    load(ring, lane, elements);
    RangeCounts counts;
    uint32_t largest = 0;
    CUTFUSE_NO_UNROLL
    for (float element : elements) {
      uint32_t const magnitude = split_math::magnitude_of(element);
      if (split_math::is_finite(magnitude)) {
        largest = max(largest, magnitude);
      } else {
        counts.flags = kNotFinite | kOutOfRange;
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
      if (of_row >= split_math::kManyInBlock || split_math::is_extreme(exponent)) counts.flags |= kOutOfRange;
      if (largest == 0 && lane.half == 0) counts.absent = 1;
    }
    store<false>(ring, lane, elements, scale);
    if (lane.half == 0) scales[lane.row] = scale;
    return counts;
  }
};

}  // namespace sm90
}  // namespace cutfuse
