// Which tile of the output, and which steps of K, a persistent block multiplies next.
#pragma once

#include <cutlass/cutlass.h>

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {
namespace sm90 {

// The steps of K of one output tile that a block multiplies.
struct StepRange {
  int first;
  int count;
};

struct TileSlice {
  int m;  // tile coordinates
  int n;
  int tile;  // their number
  int slice;
  StepRange steps;
};

// Tiles in bands of a few rows of tiles, columns first within a band, so that the blocks in flight share both operands
// in the L2; the slices of a tile's K one after the other.
struct TileOrder {
  static constexpr int kTile = 128;
  static constexpr int kBand = 8;

  int tiles_m;
  int tiles_n;
  int slices;
  int steps;            // of K
  int steps_per_slice;  // the last slice may have fewer, but has one

  static TileOrder make(int m, int n, int k, int slices) {
    int const steps = k / kSplitBlock;
    return {(m + kTile - 1) / kTile, (n + kTile - 1) / kTile, slices, steps, (steps + slices - 1) / slices};
  }

  CUTLASS_HOST_DEVICE int units() const { return tiles_m * tiles_n * slices; }

  CUTLASS_DEVICE TileSlice at(int unit) const {
    int const tile = unit / slices;
    int const slice = unit - tile * slices;
    int const band = tile / (kBand * tiles_n);
    int const first_m = band * kBand;
    int const rows = tiles_m - first_m < kBand ? tiles_m - first_m : kBand;
    int const within = tile - band * kBand * tiles_n;
    int const first = slice * steps_per_slice;
    int const count = steps - first < steps_per_slice ? steps - first : steps_per_slice;
    return {first_m + within % rows, within / rows, tile, slice, {first, count}};
  }
};

}  // namespace sm90
}  // namespace cutfuse
