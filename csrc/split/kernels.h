// Splits an fp32 matrix into planes of 16-bit parts (see planes.h): the launchers, and the guard that kernels read
// behind a split.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/launch.h"
#include "split/planes.h"
#include "split/split_math.h"
#include "split/split_plan.h"

namespace cutfuse {

// Launches the kernel, which reads the source once and writes the planes once.
cudaError_t run_split(SplitProblem const& problem, cudaStream_t stream);

// Row and column numbers are 32-bit, which saves registers for more loads in flight. Offsets need 64 bits.
struct SplitParameters {
  float const* source;
  int64_t row_stride;
  int64_t column_stride;
  int64_t plane_stride;  // elements between an element's parts in neighbouring planes
  int64_t block_stride;  // elements between neighbouring blocks of columns
  Planes planes;
  ClearedWords cleared;
  SplitGuard only_if;
  int32_t rows;
  int32_t columns;
  int32_t pitch;
  int32_t scale_pitch;
  int32_t row_tiles;
  int32_t column_tiles;
  int32_t width_shift;
  int32_t blocks;
  SplitScheme scheme;
  bool shares_scales;  // groups of kSharedScaleRows rows have one scale
  bool guarded;
};

// Takes rows that are contiguous, with any row stride and alignment.
cudaError_t launch_split_rows(SplitParameters const& parameters, cudaStream_t stream);
// Takes any strides. Reads are coalesced where neighbouring rows are adjacent in memory, as in a transposed matrix.
cudaError_t launch_split_transposed(SplitParameters const& parameters, cudaStream_t stream);

#if defined(__CUDACC__)

// The OR of those flags of one operand that this thread reads.
__device__ __forceinline__ uint32_t read_flags(uint32_t const* flags, int count) {
  constexpr int kLoads = 4;  // in flight, because each has the latency of the L2
  int const step = static_cast<int>(blockDim.x);
  uint32_t bits = 0;
  CUTFUSE_NO_UNROLL
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kLoads * step) {
    uint32_t words[kLoads];
    CUTFUSE_UNROLL
    for (int load = 0; load < kLoads; ++load) {
      int const index = first + load * step;
      // Does not use the read-only cache, because the kernel that writes the flags may still be running when this one
      // is launched.
      words[load] = index < count ? __ldcg(flags + index) : 0;
    }
    CUTFUSE_UNROLL
    for (int load = 0; load < kLoads; ++load) bits |= words[load];
  }
  return bits;
}

// Returns the OR of all flags to every thread of the block. All threads call it, in a one-dimensional block; it has two
// barriers.
__device__ __forceinline__ uint32_t read_guard(SplitGuard const& guard) {
  uint32_t bits = 0;
  CUTFUSE_UNROLL
  for (int operand = 0; operand < 2; ++operand) {
    if (guard.flags[operand] != nullptr) bits |= read_flags(guard.flags[operand], guard.counts[operand]);
  }
  uint32_t const out_of_range = __syncthreads_or(static_cast<int>(bits & kOutOfRange)) != 0 ? kOutOfRange : 0;
  uint32_t const not_finite = __syncthreads_or(static_cast<int>(bits & kNotFinite)) != 0 ? kNotFinite : 0;
  return out_of_range | not_finite;
}

// Whether split3 would lose accuracy. All threads call it, as read_guard().
__device__ __forceinline__ bool guard_trips(SplitGuard const& guard) { return (read_guard(guard) & kOutOfRange) != 0; }

#endif

// Device functions that both splitting kernels use. A group is sixteen lanes that hold one block of 64 elements, four
// neighbouring elements in each lane. All threads of a warp have to call these functions together.

constexpr int kGroupLanes = 16;
constexpr int kLaneElements = kSplitBlock / kGroupLanes;
constexpr unsigned kWholeWarp = 0xffffffffu;

constexpr int kThreadRows =
    4;  // rows of a group in one iteration; count_out_of_range() packs a byte for each into a word

// What a thread found in its elements. All lanes of a group have the same out_of_range.
struct SplitFindings {
  uint32_t bits = 0;
  uint32_t out_of_range = 0;
};

#if defined(__CUDACC__)

using ThreadValues = float[kThreadRows][kLaneElements];
using ThreadScales = float[kThreadRows];

// All threads call it first: waits for the previous kernel and clears memory. Returns whether the pass has to run.
__device__ __forceinline__ bool begin_pass(SplitParameters const& parameters) {
  begin_behind_previous_kernel();
  if (parameters.guarded && !guard_trips(parameters.only_if)) return false;
  if (blockIdx.x > 0) return true;
  for (int i = static_cast<int>(threadIdx.x); i < parameters.cleared.count; i += static_cast<int>(blockDim.x)) {
    parameters.cleared.words[i] = 0;
  }
  return true;
}

// Finds a lane's largest finite magnitude in each row. One comparison with the largest of all rows tells whether any
// element is infinite or NaN, which is rare; only then are the rows searched again for finite elements.
template <SplitScheme scheme>
__device__ __forceinline__ void find_largest(ThreadValues const& values, uint32_t (&largest)[kThreadRows],
                                             SplitFindings& findings) {
  uint32_t of_all = 0;
  CUTFUSE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) {
    largest[row] = 0;
    CUTFUSE_UNROLL
    for (int i = 0; i < kLaneElements; ++i) largest[row] = max(largest[row], split_math::magnitude_of(values[row][i]));
    of_all = max(of_all, largest[row]);
  }
  if (split_math::is_finite(of_all)) return;
  findings.bits |= scheme == SplitScheme::kSplit3 ? kNotFinite | kOutOfRange : kNotFinite;
  CUTFUSE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) {
    largest[row] = 0;
    CUTFUSE_UNROLL
    for (int i = 0; i < kLaneElements; ++i) {
      uint32_t const magnitude = split_math::magnitude_of(values[row][i]);
      if (split_math::is_finite(magnitude)) largest[row] = max(largest[row], magnitude);
    }
  }
}

// Counts the elements of a group that are out of split3's range. Each row has one byte of the count, which is at
// most 64.
__device__ __forceinline__ void count_out_of_range(ThreadValues const& values, ThreadScales const& scales,
                                                   bool shares_scales, SplitFindings& findings) {
  uint32_t counts = 0;
  CUTFUSE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) {
    uint32_t const bound = split_math::lowest_rank(scales[row]);
    CUTFUSE_UNROLL
    for (int i = 0; i < kLaneElements; ++i) {
      if (split_math::rank_of(values[row][i]) < bound) counts += 1u << 8 * row;
    }
  }
  CUTFUSE_UNROLL
  for (int lanes = kGroupLanes / 2; lanes > 0; lanes /= 2) counts += __shfl_xor_sync(kWholeWarp, counts, lanes);
  static_assert(split_math::many_in_block(false) == 4 && split_math::many_in_block(true) == 8,
                "the masks below test for counts >= 4 and >= 8");
  if ((counts & (shares_scales ? 0xf8f8f8f8u : 0xfcfcfcfcu)) != 0) findings.bits |= kOutOfRange;
  findings.out_of_range = __dp4a(counts, 0x01010101u, findings.out_of_range);
}

// Gives all rows of a thread the same value.
__device__ __forceinline__ void set_all(uint32_t (&largest)[kThreadRows], uint32_t value) {
  CUTFUSE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) largest[row] = value;
}

__device__ __forceinline__ uint32_t largest_of_all(uint32_t const (&largest)[kThreadRows]) {
  static_assert(kThreadRows == 4);
  return max(max(largest[0], largest[1]), max(largest[2], largest[3]));
}

// Finds the scales of a group's blocks, and multiplies the elements by their reciprocals. Where rows share scales,
// `share` replaces each block's largest magnitude by the largest of all rows with the same scale.
template <SplitScheme scheme, class Share>
__device__ __forceinline__ void scale_blocks(ThreadValues& values, ThreadScales& scales, SplitFindings& findings,
                                             bool shares_scales, Share const& share) {
  uint32_t largest[kThreadRows];
  find_largest<scheme>(values, largest, findings);
  CUTFUSE_UNROLL
  for (int lanes = kGroupLanes / 2; lanes > 0; lanes /= 2) {
    CUTFUSE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      largest[row] = max(largest[row], __shfl_xor_sync(kWholeWarp, largest[row], lanes));
    }
  }
  if (shares_scales) share(largest);
  CUTFUSE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) {
    int const exponent = split_math::exponent_of(largest[row]);
    scales[row] = split_math::block_scale<plane_count(scheme)>(exponent);
    if (scheme == SplitScheme::kSplit3 && split_math::is_extreme(exponent)) findings.bits |= kOutOfRange;
  }
  if constexpr (scheme == SplitScheme::kSplit3) count_out_of_range(values, scales, shares_scales, findings);
  CUTFUSE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) {
    float const up = split_math::reciprocal(scales[row]);
    CUTFUSE_UNROLL
    for (int i = 0; i < kLaneElements; ++i)
      values[row][i] = split_math::scale_up<plane_count(scheme)>(values[row][i], up);
  }
}

// The address of an element's first part.
__device__ __forceinline__ uint16_t* first_part(SplitParameters const& parameters, int row, int column) {
  return static_cast<uint16_t*>(parameters.planes.values) + column / kSplitBlock * parameters.block_stride +
         static_cast<int64_t>(row) * kSplitBlock + column % kSplitBlock;
}

// Splits a lane's four scaled elements and stores their parts. `high`: the address of the first one's first part.
template <SplitScheme scheme>
__device__ __forceinline__ void store_parts(float const (&values)[kLaneElements], uint16_t* high,
                                            int64_t plane_stride) {
  constexpr int kParts = plane_count(scheme);
  split_math::PairParts<kParts> const first = split_math::split_pair<kParts>(values[0], values[1]);
  split_math::PairParts<kParts> const second = split_math::split_pair<kParts>(values[2], values[3]);
  CUTFUSE_UNROLL
  for (int part = 0; part < kParts; ++part) {
    // One 64-bit store: ptxas 13.0 makes two stores of a pair of 32-bit words where that saves it a move.
    *reinterpret_cast<uint64_t*>(high + part * plane_stride) =
        first.words[part] | static_cast<uint64_t>(second.words[part]) << 32;
  }
}

// Writes the thread block's flag word. All threads call it, with the same `elements`: how many the block has split.
// That is below 2^31, because a device's memory does not hold 2^31 elements for each thread block.
__device__ __forceinline__ void write_flags(SplitFindings findings, int elements, uint32_t* flags) {
  __shared__ uint32_t out_of_range;
  if (threadIdx.x == 0) out_of_range = 0;
  __syncthreads();
  if (threadIdx.x % kGroupLanes == 0 && findings.out_of_range > 0) {
    atomicAdd(&out_of_range, findings.out_of_range);
  }
  uint32_t bits = __syncthreads_or(static_cast<int>(findings.bits & kOutOfRange)) != 0 ? kOutOfRange : 0;
  if (__syncthreads_or(static_cast<int>(findings.bits & kNotFinite)) != 0) bits |= kNotFinite;
  if (threadIdx.x != 0) return;
  if (static_cast<int64_t>(out_of_range) * split_math::kRareFraction > elements) bits |= kOutOfRange;
  flags[blockIdx.x] = bits;
}

// How many of the `size` rows or columns of a tile that begins at `first` are inside the matrix.
__device__ __forceinline__ int extent_within(int first, int size, int extent) {
  return min(max(extent - first, 0), size);
}

#endif

}  // namespace cutfuse
