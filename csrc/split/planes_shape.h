// Sizes of a matrix's planes, and how thread blocks are laid over a matrix that is split: host code that knows no CUDA.
#pragma once

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {

constexpr int kSplitGroups = 16;    // of 16 threads, each group with a block of 64 elements at a time
constexpr int kSplitGroupRows = 4;  // that a group of split_rows takes at once: four loads in flight for each thread
constexpr int kSplitTileRows = 64;  // of split_transposed, which takes one block of columns at a time

struct SplitTiles {
  int32_t width_shift;  // split_rows: log2 of the groups that lie side by side, in pairs one below the other
  int64_t row_tiles;    // they cover the rows up to a multiple of kScaleAlignment
  int64_t column_tiles;
  int64_t blocks;  // each takes every blocks-th tile
};

SplitTiles split_tiles(int64_t rows, int64_t columns, bool transposed);

// transposed: neighbours in a row are not neighbours in memory.
PlanesShape planes_shape(int64_t rows, int64_t columns, SplitPlan plan, bool transposed, bool is_weight);

}  // namespace cutfuse
