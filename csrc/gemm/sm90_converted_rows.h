// Splits an fp32 operand in the registers of the warpgroup that multiplies it. In an iteration, the TMA has copied 64
// columns of 64 rows to shared memory; a warpgroup reads them once and makes parts in the registers that wgmma takes as
// its first operand. The bandwidth of shared memory limits a product that splits an operand, so nothing is written
// back.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cutlass/cutlass.h>

#include <cstdint>
#include <cstring>
#include <cute/tensor.hpp>

#include "common/host_device.h"
#include "gemm/sm90_plane_products.h"
#include "split/planes.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

// What a thread block has found in the operand that it splits. In shared memory; has to be zero at first.
struct RangeFindings {
  uint32_t flags;         // bits as in split/planes.h
  uint32_t out_of_range;  // elements that are out of range, wherever they are

  // The flag word of the thread block, which has split `elements` elements.
  __device__ __forceinline__ uint32_t flags_of(int64_t elements) const {
    return flags | (int64_t{out_of_range} * split_math::kRareFraction > elements ? kOutOfRange : 0);
  }
};

// The row of the operand that row `slot` of wgmma's first operand holds. Of sixteen rows the even ones come first, so
// that the two rows of a thread are neighbours, and the sixteen lanes of a shared memory access have no bank conflict.
CUTLASS_DEVICE int row_of_slot(int slot) { return (slot & ~15) | (slot & 7) << 1 | (slot >> 3 & 1); }

// A thread's part of an iteration: two neighbouring rows, and of every eight columns two neighbouring ones, which is
// how wgmma lays out a first operand in registers.
template <SplitScheme scheme, int tile_rows>
struct ConvertedRows {
  static constexpr int kParts = plane_count(scheme);
  static constexpr int kRows = 2;
  static constexpr int kPairs = kSplitBlock / 8;
  static constexpr int kHalfBytes = tile_rows * 128;  // bytes of 32 columns: swizzled rows of 128 bytes
  static_assert(scale_rows(SplitScheme::kSplit3, true) == 16, "a warp's rows have one scale");

  // Modes: (element of a pair, row, half of an instruction's columns), 1, instruction, part.
  using Parts = decltype(cute::make_tensor<SplitElement<scheme>>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kSplitBlock / 16>,
                               cute::Int<kParts>>>{}));
  Parts parts;
  float scales[kRows];  // in split3, all rows of a warp have the same scale

  // Splits one buffer of the ring, which begins at byte `step`. All threads of a warpgroup call it together. `thread`
  // counts the threads of both warpgroups.
  CUTLASS_DEVICE void convert(char const* ring, int step, int thread, RangeFindings& findings) {
    Elements elements;
    load(ring, step, thread, elements);
    if constexpr (scheme == SplitScheme::kSplit3) {
      split_to_halves(elements, findings);
    } else {
      split_to_bfloat16s(elements);
    }
  }

 private:
  using Elements = float2[kRows][kPairs];

  CUTLASS_DEVICE static void load(char const* ring, int step, int thread, Elements& elements) {
    int const lane = thread % 32;
    int const row = row_of_slot(thread / 32 * 16 + lane / 4);
    // The swizzle XORs the number of a 16-byte vector with the row's number modulo 8. The address of each further pair
    // is therefore that of the first one XOR the pair's distance.
    int const first = step + row * 128 + (lane % 4 / 2 ^ row % 8) * 16 + lane % 2 * 8;
    CUTFUSE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTFUSE_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        int const place = pair / 4 * kHalfBytes + i * 128 + (first ^ (pair % 4 * 32 + i * 16));
        elements[i][pair] = *reinterpret_cast<float2 const*>(ring + place);
      }
    }
  }

  // The largest magnitude. NaN is ignored. finite_ones: skip infinities too (slower).
  template <bool finite_ones>
  CUTLASS_DEVICE static uint32_t largest_of(float2 const (&elements)[kPairs]) {
    float of_every_other[2] = {};  // two chains of maxima, each half as long
    CUTFUSE_UNROLL
    for (float2 const& pair : elements) {
      float const x = ::fabsf(pair.x);
      float const y = ::fabsf(pair.y);
      bool const takes_x = !finite_ones || split_math::is_finite(to_bits(x));
      bool const takes_y = !finite_ones || split_math::is_finite(to_bits(y));
      of_every_other[0] = ::fmaxf(of_every_other[0], takes_x ? x : 0.0f);
      of_every_other[1] = ::fmaxf(of_every_other[1], takes_y ? y : 0.0f);
    }
    return to_bits(::fmaxf(of_every_other[0], of_every_other[1]));
  }

  template <bool finite_ones>
  CUTLASS_DEVICE static uint32_t largest_of_warp(Elements const& elements) {
    return __reduce_max_sync(0xffffffffu,
                             max(largest_of<finite_ones>(elements[0]), largest_of<finite_ones>(elements[1])));
  }

  // The largest value of the four lanes that share a row.
  CUTLASS_DEVICE static uint32_t largest_of_lanes(uint32_t of_lane) {
    of_lane = max(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, 1));
    return max(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, 2));
  }

  // Infinities and NaN set the flags. Without a guard, the product is computed all the same, and the scale of their
  // block is that of its finite elements.
  CUTLASS_DEVICE void split_to_halves(Elements const& elements, RangeFindings& findings) {
    uint32_t largest = largest_of_warp<false>(elements);
    bool const finite = split_math::is_finite(largest);
    if (!finite) largest = largest_of_warp<true>(elements);
    int const exponent = split_math::exponent_of(largest);
    float const scale = split_math::block_scale<kParts>(exponent);
    __half2 least = __float2half2_rn(1.0f);
    CUTFUSE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      scales[row] = scale;
      split_row(elements[row], row, [&](uint32_t high) {
        __half2 pair;
        memcpy(&pair, &high, sizeof(pair));
        least = __hmin2_nan(least, __habs2(pair));
      });
    }
    // A low bound in fp16: a value that rounds to 2^-3 may lie below it, so equality also takes the exact count.
    __half const bound = __float2half(0x1p-3f);
    bool const odd =
        !finite || split_math::is_extreme(exponent) || !__hgt(__hmin_nan(__low2half(least), __high2half(least)), bound);
    if (__any_sync(0xffffffffu, odd)) count_out_of_range(elements, exponent, scale, findings);
  }

  CUTLASS_DEVICE void split_to_bfloat16s(Elements const& elements) {
    uint32_t largest[kRows] = {largest_of<false>(elements[0]), largest_of<false>(elements[1])};
    bool const all_finite = __all_sync(0xffffffffu, split_math::is_finite(max(largest[0], largest[1])));
    CUTFUSE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      if (!all_finite) largest[row] = largest_of<true>(elements[row]);
      scales[row] = split_math::block_scale<kParts>(split_math::exponent_of(largest_of_lanes(largest[row])));
      split_row(elements[row], row, [](uint32_t) {});
    }
  }

  // The exact count, for iterations in which an element is zero, not finite, or close to the lower end of split3's
  // range.
  CUTLASS_DEVICE static void count_out_of_range(Elements const& elements, int exponent, float scale,
                                                RangeFindings& findings) {
    uint32_t flags = split_math::is_extreme(exponent) ? kOutOfRange : 0;
    uint32_t const bound = split_math::lowest_rank(scale);
    CUTFUSE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      uint32_t count = 0;
      CUTFUSE_UNROLL
      for (int i = 0; i < 2 * kPairs; ++i) {
        float const element = i % 2 == 0 ? elements[row][i / 2].x : elements[row][i / 2].y;
        count += split_math::rank_of(element) < bound ? 1 : 0;
        if (!split_math::is_finite(split_math::magnitude_of(element))) flags |= kNotFinite | kOutOfRange;
      }
      uint32_t of_row = count + __shfl_xor_sync(0xffffffffu, count, 1);
      of_row += __shfl_xor_sync(0xffffffffu, of_row, 2);
      if (of_row >= split_math::many_in_block(true)) flags |= kOutOfRange;
      if (count != 0) atomicAdd(&findings.out_of_range, count);
    }
    if (flags != 0) atomicOr(&findings.flags, flags);
  }

  template <class SeeHigh>
  CUTLASS_DEVICE void split_row(float2 const (&elements)[kPairs], int row, SeeHigh const& see_high) {
    constexpr bool kFinite = scheme == SplitScheme::kSplit3;
    float const up = split_math::reciprocal(scales[row]);
    auto words = cute::recast<uint32_t>(parts);  // modes: (1, row, half), 1, instruction, part
    CUTFUSE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      auto const split = split_math::split_pair<kParts, kFinite>(split_math::scale_up<kParts>(elements[pair].x, up),
                                                                 split_math::scale_up<kParts>(elements[pair].y, up));
      see_high(split.words[0]);
      CUTFUSE_UNROLL
      for (int part = 0; part < kParts; ++part) words(part * 2 * kPairs + pair * 2 + row) = split.words[part];
    }
  }
};

// Transposes a tile of accumulators by shared memory. A product whose first operand is the weight leaves the tile
// transposed in the registers of two warpgroups, and the epilogue expects it the other way round, so that nearly every
// value has to move to another thread.

struct TileExchange {
  static constexpr int kSize = 128;  // rows and columns
  static constexpr int kHalfFloats = kSize / 2 * kSize;
  float* halves[2];  // 64 rows each

  // Stores this thread's part of the tile. There has to be a barrier between put() and get().
  template <class Accumulator>
  CUTLASS_DEVICE void put(int thread, Accumulator const& total) const {
    int const lane = thread % 32;
    int const column = row_of_slot(thread / 32 * 16 + lane / 4);  // and its right neighbour
    CUTFUSE_UNROLL
    for (int group = 0; group < kSize / 8; ++group) {
      CUTFUSE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const at = place(lane % 4 * 2 + i, column) + group % 8 * 8 * kSize;
        *reinterpret_cast<float2*>(halves[group / 8] + at) =
            make_float2(total(group * 4 + i), total(group * 4 + 2 + i));
      }
    }
  }

  template <class Accumulator>
  CUTLASS_DEVICE void get(int thread, Accumulator& total) const {
    int const row = thread / 32 * 16 + thread % 32 / 4;
    float const* const from = row < kSize / 2 ? halves[0] : halves[1];
    CUTFUSE_UNROLL
    for (int group = 0; group < kSize / 8; ++group) {
      CUTFUSE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const at = place(row % (kSize / 2) + half * 8, group % 4 * 8 + thread % 4 * 2) + group / 4 * 32;
        float2 const pair = *reinterpret_cast<float2 const*>(from + at);
        total(group * 4 + half * 2) = pair.x;
        total(group * 4 + half * 2 + 1) = pair.y;
      }
    }
  }

 private:
  // The index of an element in its half. Groups of eight columns are permuted in each row, so that neither the stores
  // (to four alternate rows) nor the loads (from four consecutive rows) of a warp have bank conflicts.
  CUTLASS_DEVICE static int place(int row, int column) {
    return row * kSize + (column ^ ((row >> 1 ^ row << 1) & 3) * 8);
  }
};

}  // namespace sm90
}  // namespace cutfuse
