// What is asked of the splitting kernels, the sizes of what they write and the tiles that they cut a matrix into. Host
// code that knows no CUDA.
#pragma once

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {

constexpr int kSplitGroups = 16;  // of 16 threads in a thread block; a group splits blocks of 64 elements
constexpr int kSplitGroupRows =
    4;  // rows that a group of split_rows takes in one iteration: each thread has four loads in flight
constexpr int kSplitTileRows = 64;  // rows of a tile of split_transposed, which is one block of columns wide

struct SplitTiles {
  int32_t width_shift;  // split_rows: log2 of the blocks of columns in a tile; two groups of a warp take rows below
                        // each other
  int64_t row_tiles;    // they cover the rows rounded up to kScaleAlignment
  int64_t column_tiles;
  int64_t blocks;  // thread blocks; each takes every blocks-th tile
};

SplitTiles split_tiles(int64_t rows, int64_t columns, bool transposed);

// transposed: the elements of a row are not contiguous in memory.
PlanesShape planes_shape(int64_t rows, int64_t columns, SplitScheme scheme, bool transposed, bool is_weight);

struct SplitProblem {
  float const* source;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride;
  SplitScheme scheme;
  bool is_weight;  // the matrix is a product's second operand
  Planes planes;
  ClearedWords cleared;
  SplitGuard only_if;
  bool guarded;  // thread blocks return at once unless only_if trips
};

}  // namespace cutfuse
