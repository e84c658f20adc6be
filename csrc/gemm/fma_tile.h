// How a block of the fp32 kernels on CUDA cores shares a tile of the result, and how the operands' tiles lie in shared
// memory.
//
// A block has eight warps. A warp computes 32 columns and 16, 32 or 64 rows of the tile; where the tile has fewer than
// eight such parts, several warps compute the same part, each a slice of every stage's K.
#pragma once

#include "common/macros.h"

namespace cutfuse::fma {

constexpr int kWarpSize = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kVector = 4;       // elements of an access to shared memory, and values of K that are multiplied at once
constexpr int kLanesAlongM = 8;  // of a warp
constexpr int kLanesAlongN = 4;
constexpr int kWarpColumns = 32;
constexpr int kThreadColumns = kWarpColumns / kLanesAlongN;
constexpr int kPadding = 4;              // elements of a line in shared memory, against bank conflicts
constexpr int kMostStages = 6;           // of the operands' tiles
constexpr int kStageBudget = 96 * 1024;  // bytes for all of them: two blocks fit into a multiprocessor

// An operand's tile in shared memory, as one thread reads it: `lines` rows of x or columns of the result. Where the
// operand is read along K, a line's elements of K are neighbours; where it is read across K, those of one K.
template <bool is_across, int lanes, int lines, int tile, int tile_k>
struct OperandTile {
  static constexpr bool kAcross = is_across;
  static constexpr int kTile = tile;
  static constexpr int kTileK = tile_k;
  static constexpr int kPitch = (is_across ? tile : tile_k) + kPadding;
  static constexpr int kElements = kPitch * (is_across ? tile_k : tile);
  static constexpr int kNeighbours = lines < kVector ? lines : kVector;  // lines that one access reads across K

  // A line of a thread, relative to its warp's first. What a warp reads at once has no bank conflicts.
  CUTFUSE_HOST_DEVICE static constexpr int line_of(int lane, int index) {
    if (!is_across) return index * lanes + lane;
    return (index / kNeighbours * lanes + lane) * kNeighbours + index % kNeighbours;
  }
  CUTFUSE_HOST_DEVICE static constexpr int place_of(int line, int k) {
    return is_across ? k * kPitch + line : line * kPitch + k;
  }
};

template <int tile_m, int tile_n, int tile_k, bool x_across, bool weight_across>
struct TileShape {
  static constexpr int kThreadRows = tile_m < 64 ? tile_m / kLanesAlongM : 8;
  static constexpr int kWarpRows = kThreadRows * kLanesAlongM;
  static constexpr int kPartsM = tile_m / kWarpRows;
  static constexpr int kPartsN = tile_n / kWarpColumns;
  static constexpr int kParts = kPartsM * kPartsN;
  static constexpr int kSlices = kWarps / kParts;
  static constexpr int kGroups = tile_k / kSlices / kVector;  // of K's values in a warp's slice of a stage
  using X = OperandTile<x_across, kLanesAlongM, kThreadRows, tile_m, tile_k>;
  using Weight = OperandTile<weight_across, kLanesAlongN, kThreadColumns, tile_n, tile_k>;
  static constexpr int kStageElements = X::kElements + Weight::kElements;
  static constexpr int kStageBytes = kStageElements * static_cast<int>(sizeof(float));
  static constexpr int kFit = kStageBudget / kStageBytes;
  static constexpr int kStages = kFit < kMostStages ? kFit : kMostStages;
  // The parts' sums of all slices, before they are added.
  static constexpr int kSumPitch = kWarpColumns + kPadding;
  static constexpr int kSumElements = kWarps * kWarpRows * kSumPitch;
  static constexpr int kElements = kStages * kStageElements > kSumElements ? kStages * kStageElements : kSumElements;
  static constexpr int kSharedBytes = kElements * static_cast<int>(sizeof(float));

  static_assert(kPartsM * kWarpRows == tile_m && kPartsN * kWarpColumns == tile_n, "whole parts");
  static_assert(kParts * kSlices == kWarps, "every warp has a slice of a part");
  static_assert(kGroups * kVector * kSlices == tile_k && kGroups % 2 == 0, "two groups of K take turns in registers");
  static_assert(kStages >= 3, "copies are in flight while a stage is computed");
};

}  // namespace cutfuse::fma
