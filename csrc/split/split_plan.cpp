#include "split/split_plan.h"

#include <algorithm>

#include "common/division.h"
#include "split/split_math.h"

namespace cutfuse {

namespace {

// Eight thread blocks for each of an H200's 132 multiprocessors. Four fit at a time, so these are two waves; and every
// thread block of a GEMM reads all flags, so there should not be more of them.
constexpr int64_t kMostBlocks = 1056;

struct Findings {
  uint32_t bits = 0;
  int64_t out_of_range = 0;
};

// A matrix with contiguous rows, and its planes.
struct Source {
  float const* data;
  int64_t rows;
  int64_t columns;

  // Columns past the last are zero.
  void read_block(int64_t row, int64_t block, float (&elements)[kSplitBlock]) const {
    int64_t const first = block * kSplitBlock;
    std::fill(std::copy_n(data + row * columns + first, std::min<int64_t>(columns - first, kSplitBlock), elements),
              elements + kSplitBlock, 0.0f);
  }
};

// The largest magnitude of a block's finite elements.
template <int parts>
uint32_t find_largest(float const (&block)[kSplitBlock], Findings& findings) {
  uint32_t largest = 0;
  for (float const x : block) {
    uint32_t const magnitude = split_math::magnitude_of(x);
    if (split_math::is_finite(magnitude)) {
      largest = std::max(largest, magnitude);
    } else {
      findings.bits |= kNotFinite | (parts == 2 ? kOutOfRange : 0);
    }
  }
  return largest;
}

template <int parts>
void split_block(float const (&block)[kSplitBlock], float scale, bool shares_scale, uint16_t* values,
                 int64_t plane_stride, Findings& findings) {
  float const up = split_math::reciprocal(scale);
  uint32_t out_of_range = 0;
  for (int i = 0; i < kSplitBlock; i += 2) {
    float const scaled[2] = {split_math::scale_up<parts>(block[i], up), split_math::scale_up<parts>(block[i + 1], up)};
    split_math::PairParts<parts> const pair = split_math::split_pair<parts>(scaled[0], scaled[1]);
    for (int part = 0; part < parts; ++part) {
      values[part * plane_stride + i] = static_cast<uint16_t>(pair.words[part] & 0xffffu);
      values[part * plane_stride + i + 1] = static_cast<uint16_t>(pair.words[part] >> 16);
    }
    for (int j = 0; j < 2; ++j)
      out_of_range += split_math::rank_of(block[i + j]) < split_math::lowest_rank(scale) ? 1 : 0;
  }
  if (parts != 2) return;
  if (out_of_range >= split_math::many_in_block(shares_scale)) findings.bits |= kOutOfRange;
  findings.out_of_range += out_of_range;
}

// Splits one block of columns of the rows that share a scale, from first_row on. Returns the scale.
template <int parts>
float split_rows(Source const& source, int64_t first_row, int64_t count, int64_t block, bool shares_scale,
                 uint16_t* values, Findings& findings) {
  float elements[kSplitBlock];
  uint32_t largest = 0;
  for (int64_t row = first_row; row < first_row + count; ++row) {
    source.read_block(row, block, elements);
    largest = std::max(largest, find_largest<parts>(elements, findings));
  }
  int const exponent = split_math::exponent_of(largest);
  if (parts == 2 && split_math::is_extreme(exponent)) findings.bits |= kOutOfRange;
  float const scale = split_math::block_scale<parts>(exponent);
  int64_t const plane_stride = source.rows * kSplitBlock;
  for (int64_t row = first_row; row < first_row + count; ++row) {
    source.read_block(row, block, elements);
    split_block<parts>(elements, scale, shares_scale, values + block * parts * plane_stride + row * kSplitBlock,
                       plane_stride, findings);
  }
  return scale;
}

template <int parts>
uint32_t split_matrix(Source const& source, int64_t rows_of_scale, uint16_t* values, float* scales) {
  int64_t const blocks = ceil_divide(source.columns, kSplitBlock);
  int64_t const scale_pitch = round_up(source.rows, kScaleAlignment) / rows_of_scale;
  Findings findings;
  std::fill(scales, scales + blocks * scale_pitch, 1.0f);
  for (int64_t row = 0; row < source.rows; row += rows_of_scale) {
    int64_t const count = std::min(rows_of_scale, source.rows - row);
    for (int64_t block = 0; block < blocks; ++block) {
      scales[block * scale_pitch + row / rows_of_scale] =
          split_rows<parts>(source, row, count, block, rows_of_scale > 1, values, findings);
    }
  }
  if (findings.out_of_range * split_math::kRareFraction > source.rows * source.columns) {
    findings.bits |= kOutOfRange;
  }
  return findings.bits;
}

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

uint32_t split_reference(float const* source, int64_t rows, int64_t columns, SplitScheme scheme, bool is_weight,
                         uint16_t* values, float* scales) {
  Source const matrix = {source, rows, columns};
  int64_t const rows_of_scale = scale_rows(scheme, is_weight);
  return scheme == SplitScheme::kSplit3 ? split_matrix<2>(matrix, rows_of_scale, values, scales)
                                        : split_matrix<3>(matrix, rows_of_scale, values, scales);
}

}  // namespace cutfuse
