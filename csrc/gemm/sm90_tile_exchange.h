// Transposes a tile of accumulators by shared memory. A product whose first operand is the weight leaves the tile
// transposed in the registers of two warpgroups, and the epilogue expects it the other way round, so that nearly every
// value has to move to another thread.
#pragma once

#include <cutlass/cutlass.h>

#include "common/macros.h"
#include "gemm/sm90_converted_rows.h"

namespace cutfuse {
namespace sm90 {

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
