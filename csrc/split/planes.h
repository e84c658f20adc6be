// Planes of 16-bit parts represent an fp32 matrix, so that 16-bit tensor cores can multiply it with fp32's accuracy. A
// block is 64 consecutive elements of a row. Each block has a power-of-two scale, which brings its largest magnitude
// near the top of the 16-bit type's range. In split3, neighbouring rows of a weight share their scales.
//
// split3 has two fp16 parts: high = x * s and low = x * s - high, where s puts the largest magnitude of a block into
// [2^14, 2^15). A product is high * high + high * low + low * high. The method is that of Markidis et al., 2018, with a
// scale for each block. Ootomo and Yokota, 2022, also multiply low by 2^11, which keeps 22 bits for elements down to
// 2^27 below the block's largest instead of 2^17; but the low products then need their own chain of instructions, which
// costs 3 to 6% (H200). A guarded product runs split6 instead where too many elements are below 2^17.
//
// split6 has three bf16 parts, high, middle and low. Each is the rounded remainder of those before it, and the scale
// puts the largest magnitude of a block into [1, 2). A product is the sum of the six largest products of parts. bf16
// has fp32's range of exponents, so only products 2^126 below the product of their blocks' largest elements are lost.
#pragma once

#include <cstdint>

namespace cutfuse {

enum class SplitScheme : int32_t { kSplit3 = 3, kSplit6 = 6 };

constexpr int kSplitBlock = 64;       // consecutive elements with one scale; K advances by it in an iteration
constexpr int kScaleAlignment = 128;  // rows; one bulk copy loads the scales of a tile

// Bits of the flag word that a thread block of a splitting kernel writes.
constexpr uint32_t kOutOfRange = 1;  // split3 would lose accuracy
constexpr uint32_t kNotFinite = 2;   // an infinity or NaN

// In split3, this many neighbouring rows of a product's second operand, the weight, share the scales of their blocks.
// One product of two scales then serves four elements of a thread. The GPU runs these kernels at its power limit;
// sharing scales, and reading them while the tensor cores work, takes 8% off their time (H200). Split3's guard bounds
// the scales, so that fp32 represents the product of any two. Split6 has no such bound.
constexpr int kSharedScaleRows = 16;

constexpr int scale_rows(SplitScheme scheme, bool is_weight) {
  return is_weight && scheme == SplitScheme::kSplit3 ? kSharedScaleRows : 1;
}

constexpr int plane_count(SplitScheme scheme) { return scheme == SplitScheme::kSplit3 ? 2 : 3; }

// Sizes of the planes of a matrix [rows, columns].
struct PlanesShape {
  int64_t rows;
  int64_t columns;
  int64_t pitch;        // columns rounded up to whole blocks; the padding is zero
  int64_t scale_pitch;  // scales of one block of columns, for rows rounded up to kScaleAlignment
  int64_t flag_count;   // words, one for each thread block of the splitting kernel
  int64_t value_bytes;  // sizes of the three arrays of Planes
  int64_t scale_bytes;
  int64_t flag_bytes;
};

// Three arrays in device memory, each 128-byte aligned. A block of columns is contiguous, so that an iteration of a
// product's main loop reads contiguous memory from each plane.
struct Planes {
  void* values;     // [pitch / kSplitBlock, plane_count, rows, kSplitBlock] of 16 bits
  float* scales;    // [pitch / kSplitBlock, scale_pitch], one for scale_rows() rows: the matrix is the sum of a row's
                    // parts times its scale. Rows past the last have scale 1
  uint32_t* flags;  // [flag_count]; every launch that is not skipped by its guard writes all of them
};

// An fp32 operand that the product itself splits, after loading it.
struct ConvertedOperand {
  float const* data;
  int64_t pitch;
  int64_t columns;
  uint32_t* flags;  // [flag_count], one word for each thread block of the product, as in Planes; null for no flags
  int32_t flag_count;
};

// Device memory that a splitting kernel sets to zero for the kernel that follows it.
struct ClearedWords {
  int32_t* words;
  int32_t count;
};

// The guard trips if a flag of either operand says that split3 would lose accuracy. Null flags never trip it.
struct SplitGuard {
  uint32_t const* flags[2];
  int32_t counts[2];
};

}  // namespace cutfuse
