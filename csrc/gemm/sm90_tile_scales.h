// The scales of one step of a product over planes, and the addition of the step's sum to the fp32 accumulators.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>

#include "split/planes.h"

namespace cutfuse {
namespace sm90 {

// The scales of a thread's elements, which are in two rows eight apart and in pairs of columns eight apart.
template <int tile_n>
struct TileScales {
  static constexpr int kPairs = tile_n / 8;
  float rows[2];
  float2 columns[kPairs];

  CUTLASS_DEVICE void read_rows(float const* scales) {
    rows[0] = scales[0];
    rows[1] = scales[8];
  }
  CUTLASS_DEVICE void read_columns(float const* scales) {
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) columns[pair] = *reinterpret_cast<float2 const*>(scales + pair * 8);
  }

  // Multiplies by the row's scale first: the product of two scales may overflow although the result does not.
  template <class Accumulator>
  CUTLASS_DEVICE void promote(Accumulator const& sum, Accumulator& total) const {
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < 2; ++row) {
        int const i = pair * 4 + row * 2;
        total(i) = ::fmaf(sum(i) * rows[row], columns[pair].x, total(i));
        total(i + 1) = ::fmaf(sum(i + 1) * rows[row], columns[pair].y, total(i + 1));
      }
    }
  }
};

// Like TileScales, for planes of B whose rows share scales (see scale_rows()): one product of scales then serves four
// elements.
template <int tile_n>
struct SharedTileScales {
  static constexpr int kGroups = tile_n / kSharedScaleRows;
  float products[2][kGroups];  // a row's scale times a group's

  CUTLASS_DEVICE void read(float const* row_scales, float const* group_scales) {
    float const rows[2] = {row_scales[0], row_scales[8]};
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kGroups; first += 4) {
      float4 const loaded = *reinterpret_cast<float4 const*>(group_scales + first);
      float const groups[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) products[i / 4][first + i % 4] = rows[i / 4] * groups[i % 4];
    }
  }

  template <class Accumulator>
  CUTLASS_DEVICE void promote(Accumulator const& sum, Accumulator& total) const {
    static_assert(kSharedScaleRows == 16, "two groups of eight columns");
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < decltype(cute::size(sum))::value; ++i) {
      total(i) = ::fmaf(sum(i), products[i / 2 % 2][i / 8], total(i));
    }
  }
};

// Like TileScales, for transposed tiles, in which all rows of a warp have one scale and each column has its own. The
// warp computes the products of the two together, in shared memory, while the tensor cores compute its sum. Each thread
// then loads those that it needs.
template <int tile_m>
struct WarpTileScales {
  static_assert(tile_m == 128, "four columns for every lane");
  using Products = float[tile_m];

  // The place of a product of scales. A thread's columns, pairs that are eight apart, are contiguous; four lanes have
  // different columns, and their vectors are permuted differently, so that there are no bank conflicts.
  CUTLASS_DEVICE static int place(int lane_of_row, int element) {
    return lane_of_row * (tile_m / 4) + (element ^ lane_of_row * 4);
  }

  CUTLASS_DEVICE static void put(float row_scale, float const* column_scales, Products& products, int lane) {
    float4 const columns = reinterpret_cast<float4 const*>(column_scales)[lane];
    int const owner = lane % 2 * 2;
    int const element = lane / 2 * 2;
    *reinterpret_cast<float2*>(products + place(owner, element)) =
        make_float2(row_scale * columns.x, row_scale * columns.y);
    *reinterpret_cast<float2*>(products + place(owner + 1, element)) =
        make_float2(row_scale * columns.z, row_scale * columns.w);
    __syncwarp();
  }

  template <class Accumulator>
  CUTLASS_DEVICE static void promote(Products const& products, int lane, Accumulator const& sum, Accumulator& total) {
    CUTLASS_PRAGMA_UNROLL
    for (int vector = 0; vector < tile_m / 16; ++vector) {
      float4 const loaded = *reinterpret_cast<float4 const*>(products + place(lane % 4, vector * 4));
      float const columns[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {  // two columns of the first row, then of the second, twice
        int const at = vector * 8 + i;
        total(at) = ::fmaf(sum(at), columns[i / 4 * 2 + i % 2], total(at));
      }
    }
  }
};

}  // namespace sm90
}  // namespace cutfuse
