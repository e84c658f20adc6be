// A tile of accumulators turned over: two warpgroups hold it transposed, as products with the second operand's rows
// first leave it, and get it as the epilogue wants it. By way of shared memory, as every value changes its thread.
#pragma once

#include <cutlass/cutlass.h>

#include "common/macros.h"
#include "gemm/sm90_converted_rows.h"

namespace cutfuse {
namespace sm90 {

struct TileExchange {
  static constexpr int kSize = 128;  // rows and columns
  static constexpr int kHalfFloats = kSize / 2 * kSize;
  float* halves[2];  // of 64 rows

  // Leaves what this thread has of the tile. Between put and get all threads meet.
  template <class Accumulator>
  CUTLASS_DEVICE void put(int thread, Accumulator const& total) const {
    int const lane = thread % 32;
    int const column = row_of_slot(thread / 32 * 16 + lane / 4);  // and the next one
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
  // Of an element in its half. Groups of eight columns change places by row, so that neither the writing lanes (four
  // every other row) nor the reading ones (four rows) meet in a bank.
  CUTLASS_DEVICE static int place(int row, int column) {
    return row * kSize + (column ^ ((row >> 1 ^ row << 1) & 3) * 8);
  }
};

}  // namespace sm90
}  // namespace cutfuse
