#include "split/split_plan.h"

#include <algorithm>

#include "common/division.h"

namespace cutfuse {

namespace {

// Eight thread blocks for each of an H200's 132 multiprocessors. Four fit at a time, so these are two waves; and every
// thread block of a GEMM reads all flags, so there should not be more of them.
constexpr int64_t kMostBlocks = 1056;

}  // namespace

SplitTiles split_tiles(int64_t rows, int64_t columns, bool transposed) {
  int64_t const column_blocks = ceil_divide(columns, kSplitBlock);
  int64_t const padded_rows = round_up(rows, kScaleAlignment);
  SplitTiles tiles = {};
  if (transposed) {
    static_assert(kScaleAlignment % kSplitTileRows == 0, "whole tiles");
    tiles.row_tiles = padded_rows / kSplitTileRows;
    tiles.column_tiles = column_blocks;
  } else {
    static_assert(kScaleAlignment % (kSplitGroups * kSplitGroupRows) == 0, "whole tiles whatever their width");
    // At most so many blocks are abreast in a tile that it holds all rows of each shared scale.
    constexpr int64_t kMostAbreast = kSplitGroups * kSplitGroupRows / kSharedScaleRows;
    while (1 << tiles.width_shift < std::min(column_blocks, kMostAbreast)) ++tiles.width_shift;
    int64_t const width = int64_t{1} << tiles.width_shift;
    tiles.row_tiles = padded_rows / (kSplitGroups / width * kSplitGroupRows);
    tiles.column_tiles = ceil_divide(column_blocks, width);
  }
  tiles.blocks = std::min(tiles.row_tiles * tiles.column_tiles, kMostBlocks);
  return tiles;
}

PlanesShape planes_shape(int64_t rows, int64_t columns, SplitScheme scheme, bool transposed, bool is_weight) {
  int64_t const scale_pitch = round_up(rows, kScaleAlignment) / scale_rows(scheme, is_weight);
  int64_t const flag_count = split_tiles(rows, columns, transposed).blocks;
  int64_t const pitch = round_up(columns, kSplitBlock);
  constexpr int64_t kValueBytes = 2;
  return {rows,
          columns,
          pitch,
          scale_pitch,
          flag_count,
          plane_count(scheme) * rows * pitch * kValueBytes,
          pitch / kSplitBlock * scale_pitch * static_cast<int64_t>(sizeof(float)),
          flag_count * static_cast<int64_t>(sizeof(uint32_t))};
}

}  // namespace cutfuse
