// An fp32 matrix as planes of 16-bit parts, so that 16-bit tensor cores multiply it with fp32's accuracy. Every 64
// elements of a row, a block, have a power-of-two scale that brings their largest near the top of the type's range; in
// split3 neighbouring rows of a weight share theirs.
//
// split3: fp16 high = x * s, low = x * s - high, with the largest of a block in [2^14, 2^15); a product is
// high * high + high * low + low * high. Markidis et al., 2018, with a scale for each block. Ootomo and Yokota, 2022,
// multiply low by 2^11: that keeps 22 bits down to 2^27 and not only 2^17 below the block's largest, but the low
// products then need a chain of instructions of their own, which costs 3 to 6% (H200). A guarded product takes split6
// where too many elements are below.
// split6: bf16 high, middle and low, each the rounded rest, with the largest of a block in [1, 2); the six largest
// products. bf16 has fp32's range of exponents: only products 2^126 below those of their blocks' largest are lost.
#pragma once

#include <cstdint>

namespace cutfuse {

enum class SplitPlan : int32_t { kSplit3 = 3, kSplit6 = 6 };

constexpr int kSplitBlock = 64;       // elements of a row under one scale, and of a main loop's step
constexpr int kScaleAlignment = 128;  // rows: the scales of a tile are copied at once

// What a block of the splitting kernel found, OR-ed bits.
constexpr uint32_t kOutOfRange = 1;  // split3 would lose accuracy
constexpr uint32_t kNotFinite = 2;   // an infinity or NaN

// Neighbouring rows of a product's second operand, the weight, that share their blocks' scales in split3: a product of
// scales then serves four elements of a thread. These products run at the power limit: with it, and with scales read
// while the tensor cores work, they take 8% less time (H200). Split3's guard keeps scales where fp32 holds the product
// of two; split6's may lie beyond.
constexpr int kSharedScaleRows = 16;

constexpr int scale_rows(SplitPlan plan, bool is_weight) {
  return is_weight && plan == SplitPlan::kSplit3 ? kSharedScaleRows : 1;
}

constexpr int plane_count(SplitPlan plan) { return plan == SplitPlan::kSplit3 ? 2 : 3; }

// Sizes of the planes of a matrix [rows, columns].
struct PlanesShape {
  int64_t rows;
  int64_t columns;
  int64_t pitch;        // columns rounded up to whole blocks; the rest is zero
  int64_t scale_pitch;  // scales of a block of columns: of rows rounded up to kScaleAlignment
  int64_t flag_count;   // words, one for each block of the splitting kernel
  int64_t value_bytes;  // of the three parts of Planes
  int64_t scale_bytes;
  int64_t flag_bytes;
};

// In device memory, each part 128-byte aligned. A block of columns lies together: so what a step of a product's main
// loop reads of a plane is contiguous.
struct Planes {
  void* values;   // [pitch / kSplitBlock, plane_count, rows, kSplitBlock] of 16 bits
  float* scales;  // [pitch / kSplitBlock, scale_pitch], for every scale_rows(): values times scales give the matrix; 1
                  // past the last row
  uint32_t* flags;  // [flag_count], each written by every launch that runs
};

// An fp32 matrix that a product splits on the way in.
struct ConvertedOperand {
  float const* data;
  int64_t pitch;
  int64_t columns;
  uint32_t* flags;  // [flag_count], a word for each block of the product's grid, as in Planes; null to keep none
  int32_t flag_count;
};

// Words of device memory that a pass sets to zero for the kernel after it.
struct ClearedWords {
  int32_t* words;
  int32_t count;
};

// Whether the flags of two operands' planes say that split3 would lose accuracy; null flags never do.
struct SplitGuard {
  uint32_t const* flags[2];
  int32_t counts[2];
};

}  // namespace cutfuse
