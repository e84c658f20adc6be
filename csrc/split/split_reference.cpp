#include "split/split_reference.h"

#include <algorithm>

#include "split/split_math.h"

namespace cutfuse {
namespace {

struct Findings {
  uint32_t bits = 0;
  int64_t out_of_range = 0;
};

// One block, filled up with zeros. Returns its scale.
template <int parts>
float split_block(float const (&block)[kSplitBlock], uint16_t* values, int64_t plane_stride, Findings& findings) {
  uint32_t largest = 0;
  for (float const x : block) {
    uint32_t const magnitude = split_math::magnitude_of(x);
    if (split_math::is_finite(magnitude)) {
      largest = std::max(largest, magnitude);
    } else {
      findings.bits |= kNotFinite | (parts == 2 ? kOutOfRange : 0);
    }
  }
  int const exponent = split_math::exponent_of(largest);
  float const scale = split_math::block_scale<parts>(exponent);
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
  if (parts == 2) {
    bool const lossy = out_of_range >= split_math::kManyInBlock || split_math::is_extreme(exponent);
    if (lossy) findings.bits |= kOutOfRange;
    findings.out_of_range += out_of_range;
  }
  return scale;
}

template <int parts>
uint32_t split_matrix(float const* source, int64_t rows, int64_t columns, uint16_t* values, float* scales) {
  int64_t const blocks = (columns + kSplitBlock - 1) / kSplitBlock;
  int64_t const scale_pitch = (rows + kScaleAlignment - 1) / kScaleAlignment * kScaleAlignment;
  int64_t const plane_stride = rows * kSplitBlock;
  Findings findings;
  std::fill(scales, scales + blocks * scale_pitch, 1.0f);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      int64_t const first = block * kSplitBlock;
      float elements[kSplitBlock] = {};
      std::copy_n(source + row * columns + first, std::min<int64_t>(columns - first, kSplitBlock), elements);
      scales[block * scale_pitch + row] =
          split_block<parts>(elements, values + (block * parts * rows + row) * kSplitBlock, plane_stride, findings);
    }
  }
  if (findings.out_of_range * split_math::kRareFraction > rows * columns) {
    findings.bits |= kOutOfRange;
  }
  return findings.bits;
}

}  // namespace

uint32_t split_reference(float const* source, int64_t rows, int64_t columns, int parts, uint16_t* values,
                         float* scales) {
  return parts == 2 ? split_matrix<2>(source, rows, columns, values, scales)
                    : split_matrix<3>(source, rows, columns, values, scales);
}

}  // namespace cutfuse
