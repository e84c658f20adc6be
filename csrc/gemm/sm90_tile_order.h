// The order in which persistent thread blocks take output tiles and slices of K.
#pragma once

#include <cutlass/cutlass.h>

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {
namespace sm90 {

// The range of K's steps that a block multiplies for one output tile.
struct StepRange {
  int first;
  int count;
};

struct TileSlice {
  int m;  // tile coordinates
  int n;
  int tile;  // the tile's number
  int slice;
  StepRange steps;
};

// Tiles are numbered in bands of a few rows of tiles, and within a band along the columns first, so that blocks that
// run at the same time share both operands in the L2. The slices of a tile's K have consecutive numbers.
struct TileOrder {
  static constexpr int kTile = 128;
  static constexpr int kBand = 8;

  int tiles_m;
  int tiles_n;
  int slices;
  int steps;            // of the whole K
  int steps_per_slice;  // the last slice may have fewer, but at least one

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
