// Who works when, and on what: the named barriers, the turns of consumer warpgroups, and the order of tiles.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {
namespace sm90 {

// The named barriers of kernels that are not CUTLASS's. A thread block has sixteen, and every use in a kernel needs one
// of its own.

// The pingpong kernel's.
constexpr uint32_t kFirstStoreBarrier = 0;  // and 1: one for each consumer warpgroup

// Those of a product over planes.
constexpr int kConsumerThreads = 2 * cutlass::NumThreadsPerWarpGroup;
constexpr uint32_t kConsumersBarrier = 0;
constexpr uint32_t kFirstTurnBarrier = 1;  // and 2: one for each consumer warpgroup

CUTLASS_DEVICE void synchronize_consumers() { cutlass::arch::NamedBarrier::sync(kConsumerThreads, kConsumersBarrier); }

// The two consumer warpgroups of a product take turns at the tensor cores: while one adds its sum to the accumulators,
// the other's products run. Without turns they share the tensor cores, finish at the same time and leave the tensor
// cores idle while both add: split3 of 1024x8192x8192 then takes 686 us instead of 637 (H200).

// A thread's view of the turns. Each warpgroup waits for its turn at a named barrier of its own.
struct ConsumerTurns {
  int warp_group;

  // The shuffle tells the compiler that all threads of a warp have the same warpgroup.
  CUTLASS_DEVICE explicit ConsumerTurns(int thread)
      : warp_group(__shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0)) {}

  // begin() and end() enclose all turns of a block. The first warpgroup has the first turn.
  CUTLASS_DEVICE void begin() const {
    if (warp_group == 1) pass();
  }
  CUTLASS_DEVICE void end() const {
    if (warp_group == 0) take();
  }

  CUTLASS_DEVICE void take() const {
    cutlass::arch::NamedBarrier::sync(kConsumerThreads, kFirstTurnBarrier + warp_group);
  }
  CUTLASS_DEVICE void pass() const {
    cutlass::arch::NamedBarrier::arrive(kConsumerThreads, kFirstTurnBarrier + (warp_group ^ 1));
  }
};

// The order in which persistent thread blocks take output tiles and slices of K.

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
