// The scales of one step of a product over planes, and the addition of the step's sum to the fp32 accumulators.
#pragma once

#include <cutlass/cutlass.h>

namespace cutfuse {
namespace sm90 {

// Of a thread's elements: two rows eight apart, and pairs of neighbouring columns eight apart.
template <int tile_n>
struct TileScales {
  static constexpr int kPairs = tile_n / 8;
  float rows[2];
  float2 columns[kPairs];

  CUTLASS_DEVICE void read_rows(float const* scales_a) {
    rows[0] = scales_a[0];
    rows[1] = scales_a[8];
  }
  CUTLASS_DEVICE void read_columns(float const* scales_b) {
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) columns[pair] = *reinterpret_cast<float2 const*>(scales_b + pair * 8);
  }

  // The row's scale first: a product of two scales may overflow where the result does not.
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

}  // namespace sm90
}  // namespace cutfuse
