// A step of an fp32 operand, split in the registers of the warpgroup that multiplies it: 64 columns of 64 rows, as the
// copy engine left them in shared memory, become planes that wgmma takes as its first operand. Shared memory is what
// limits a product that splits an operand on its way in, and this reads the step once and writes nothing back.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cutlass/cutlass.h>

#include <cstdint>
#include <cstring>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "gemm/sm90_plane_products.h"
#include "split/planes.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

// What a block has found of split3's range in the operand that it converts, in shared memory; zero at first.
struct RangeFindings {
  uint32_t flags;         // of planes
  uint32_t out_of_range;  // elements; where they are many a block has set its flag

  // Of the block, when it has converted so many elements.
  __device__ __forceinline__ uint32_t flags_of(int64_t elements) const {
    return flags | (int64_t{out_of_range} * split_math::kRareFraction > elements ? kOutOfRange : 0);
  }
};

// The rows of wgmma's first operand lie in another order than the operand's: of sixteen, the even ones come first. So a
// thread has two neighbours, and the sixteen lanes that are served at once meet no bank twice.
CUTLASS_DEVICE int row_of_slot(int slot) { return (slot & ~15) | (slot & 7) << 1 | (slot >> 3 & 1); }

// Two neighbouring rows of a step in a thread: a quarter of their columns, two neighbours of every eight, as wgmma has
// them.
template <SplitPlan plan, int tile_rows>
struct ConvertedRows {
  static constexpr int kParts = plane_count(plan);
  static constexpr int kRows = 2;
  static constexpr int kPairs = kSplitBlock / 8;
  static constexpr int kHalfBytes = tile_rows * 128;  // of 32 columns, rows of 128 bytes swizzled
  static_assert(scale_rows(SplitPlan::kSplit3, true) == 16, "a warp's rows have one scale");

  // (element of a pair, row, half of an instruction's columns), 1, instruction, part
  using Parts = decltype(cute::make_tensor<typename SplitElement<plan>::type>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kSplitBlock / 16>,
                               cute::Int<kParts>>>{}));
  Parts parts;
  float scales[kRows];  // of split3, one for all rows of the warp

  // Makes parts of one step of a ring, which begins at byte `step`. All threads of a warpgroup call it together;
  // thread: of all warpgroups that share the step.
  CUTLASS_DEVICE void convert(char const* ring, int step, int thread, RangeFindings& findings) {
    Elements elements;
    load(ring, step, thread, elements);
    if constexpr (plan == SplitPlan::kSplit3) {
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
    // Vectors of 16 bytes are numbered by their place in a row, which the row's number modulo 8 is added to without
    // carry: so the place of every pair is that of the first with its distance added, likewise.
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

  // The largest magnitude, of the finite elements or, faster, of all; NaN counts for nothing either way.
  template <bool finite_ones>
  CUTLASS_DEVICE static uint32_t largest_of(float2 const (&elements)[kPairs]) {
    float of_every_other[2] = {};  // a chain half as long
    CUTFUSE_UNROLL
    for (float2 const& pair : elements) {
      float const x = ::fabsf(pair.x);
      float const y = ::fabsf(pair.y);
      bool const takes_x = !finite_ones || split_math::is_finite(split_math::to_bits(x));
      bool const takes_y = !finite_ones || split_math::is_finite(split_math::to_bits(y));
      of_every_other[0] = ::fmaxf(of_every_other[0], takes_x ? x : 0.0f);
      of_every_other[1] = ::fmaxf(of_every_other[1], takes_y ? y : 0.0f);
    }
    return split_math::to_bits(::fmaxf(of_every_other[0], of_every_other[1]));
  }

  template <bool finite_ones>
  CUTLASS_DEVICE static uint32_t largest_of_warp(Elements const& elements) {
    return __reduce_max_sync(0xffffffffu,
                             max(largest_of<finite_ones>(elements[0]), largest_of<finite_ones>(elements[1])));
  }

  // The four lanes that share a row.
  CUTLASS_DEVICE static uint32_t largest_of_lanes(uint32_t of_lane) {
    of_lane = max(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, 1));
    return max(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, 2));
  }

  // Infinities and NaN trip the guard; where nothing guards, they leave their neighbours as they are.
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
    __half const bound = __float2half(0x1p-3f);  // what rounds to it may be below
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

  // Where some element is not finite or not far above the end of split3's range, or zero.
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
    constexpr bool kFinite = plan == SplitPlan::kSplit3;
    float const up = split_math::reciprocal(scales[row]);
    auto words = cute::recast<uint32_t>(parts);  // (1, row, half), 1, instruction, part
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

}  // namespace sm90
}  // namespace cutfuse
