// The main loop of the fp32 kernels on CUDA cores: how a block shares a tile of the result, how the operands' tiles lie
// in shared memory, and how they are copied there.
//
// A block has eight warps. A warp computes 32 columns and 16, 32 or 64 rows of the tile; where the tile has fewer than
// eight such parts, several warps compute the same part, each a slice of every stage's K.
#pragma once

#include <cstdint>

#include "common/host_device.h"

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

// Copies tiles of an operand from global to shared memory, as they lie: four elements at a time where the operand's
// lines begin at multiples of 16 bytes, and one at a time elsewhere.

// x [M, K] or the weight [N, K], of which lines along K or across it are contiguous.
struct OperandMatrix {
  float const* data;
  int64_t pitch;  // elements between these lines
  int extent;     // M or N
  bool has_vectors;
};

template <int bytes>
__device__ __forceinline__ void copy_async(float* shared, float const* global, int existing_bytes) {
  auto const to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(existing_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(existing_bytes) : "memory");
  }
}

// Copies the first `count` of four neighbours and writes 0 in the place of the others; a count below 1 copies none.
// `valid` is any readable address, which a copy of no bytes needs too.
__device__ __forceinline__ void copy_neighbours(float* shared, float const* global, int count, bool has_vectors,
                                                float const* valid) {
  constexpr int kBytes = sizeof(float);
  if (has_vectors) {
    copy_async<kVector * kBytes>(shared, count > 0 ? global : valid, min(max(count, 0), kVector) * kBytes);
    return;
  }
  CUTFUSE_UNROLL
  for (int i = 0; i < kVector; ++i) {
    bool const exists = i < count;
    copy_async<kBytes>(shared + i, exists ? global + i : valid, exists ? kBytes : 0);
  }
}

__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` stages are still on their way.
template <int pending>
__device__ __forceinline__ void wait_for_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Copies one tile after another along K. A thread copies four neighbours of some lines.
template <class Tile>
class OperandCopy {
 public:
  static constexpr int kPerLine = (Tile::kAcross ? Tile::kTile : Tile::kTileK) / kVector;
  static constexpr int kLines = Tile::kAcross ? Tile::kTileK : Tile::kTile;
  static constexpr int kStep = kThreads / kPerLine;  // lines that all threads copy at once
  static constexpr int kRepeats = kLines / kStep;
  static_assert(kStep * kPerLine == kThreads && kRepeats * kStep == kLines, "whole copies");

  __device__ OperandCopy(OperandMatrix const& matrix, int first, int k_end)
      : matrix_(matrix), k_end_(k_end), first_(first) {
    int const thread = static_cast<int>(threadIdx.x);
    line_ = thread / kPerLine;
    neighbour_ = thread % kPerLine * kVector;
    int64_t const along_line = Tile::kAcross ? first : 0;
    int64_t const across_lines = Tile::kAcross ? 0 : first;
    source_ = matrix.data + (across_lines + line_) * matrix.pitch + along_line + neighbour_;
  }

  __device__ void operator()(float* shared) {
    float* const to = shared + line_ * Tile::kPitch + neighbour_;
    CUTFUSE_UNROLL
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      int const line = line_ + repeat * kStep;
      int const end_of_lines = Tile::kAcross ? k_end_ - k_ : matrix_.extent - first_;
      int const end_of_neighbours = Tile::kAcross ? matrix_.extent - first_ : k_end_ - k_;
      int const count = line < end_of_lines ? end_of_neighbours - neighbour_ : 0;
      copy_neighbours(to + repeat * kStep * Tile::kPitch, source_ + repeat * kStep * matrix_.pitch, count,
                      matrix_.has_vectors, matrix_.data);
    }
    k_ += Tile::kTileK;
    source_ += Tile::kAcross ? Tile::kTileK * matrix_.pitch : Tile::kTileK;
  }

 private:
  OperandMatrix const& matrix_;
  int k_end_;
  int first_;
  int k_ = 0;
  int line_;
  int neighbour_;
  float const* source_;
};

// The part of the tile that a warp computes, and which slice of K.
struct WarpPart {
  int index;
  int m;
  int n;
  int slice;
};

template <class Shape>
__device__ __forceinline__ WarpPart part_of_warp() {
  int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int const index = warp % Shape::kParts;
  return {index, index % Shape::kPartsM * Shape::kWarpRows, index / Shape::kPartsM * kWarpColumns,
          warp / Shape::kParts};
}

__device__ __forceinline__ int lane_along_m() { return static_cast<int>(threadIdx.x) % kWarpSize / kLanesAlongN; }
__device__ __forceinline__ int lane_along_n() { return static_cast<int>(threadIdx.x) % kLanesAlongN; }

template <int width>
__device__ __forceinline__ void read_vector(float const* shared, float (&values)[width]) {
  if constexpr (width == kVector) {
    float4 const vector = *reinterpret_cast<float4 const*>(shared);
    values[0] = vector.x;
    values[1] = vector.y;
    values[2] = vector.z;
    values[3] = vector.w;
  } else {
    static_assert(width == 2, "tiles of 16 rows read two across K");
    float2 const vector = *reinterpret_cast<float2 const*>(shared);
    values[0] = vector.x;
    values[1] = vector.y;
  }
}

// A thread's elements of an operand for four values of K.
template <class Tile, int lines>
struct OperandGroup {
  float values[lines][kVector];

  // shared: the thread's first element.
  __device__ __forceinline__ void read(float const* shared) {
    if constexpr (Tile::kAcross) {
      CUTFUSE_UNROLL
      for (int k = 0; k < kVector; ++k) {
        CUTFUSE_UNROLL
        for (int line = 0; line < lines; line += Tile::kNeighbours) {
          float neighbours[Tile::kNeighbours];
          read_vector(shared + Tile::place_of(Tile::line_of(0, line), k), neighbours);
          CUTFUSE_UNROLL
          for (int i = 0; i < Tile::kNeighbours; ++i) values[line + i][k] = neighbours[i];
        }
      }
    } else {
      CUTFUSE_UNROLL
      for (int line = 0; line < lines; ++line) {
        read_vector(shared + Tile::place_of(Tile::line_of(0, line), 0), values[line]);
      }
    }
  }
};

template <class Shape>
using Sums = float[Shape::kThreadRows][kThreadColumns];

template <class X, class Weight, int rows>
__device__ __forceinline__ void multiply(OperandGroup<X, rows> const& x,
                                         OperandGroup<Weight, kThreadColumns> const& weight,
                                         float (&sums)[rows][kThreadColumns]) {
  CUTFUSE_UNROLL
  for (int k = 0; k < kVector; ++k) {
    CUTFUSE_UNROLL
    for (int row = 0; row < rows; ++row) {
      CUTFUSE_UNROLL
      for (int column = 0; column < kThreadColumns; ++column) {
        sums[row][column] = ::fmaf(x.values[row][k], weight.values[column][k], sums[row][column]);
      }
    }
  }
}

// Adds the products of a warp's slices of K to its sums. While one group is multiplied, the next one is read from
// shared memory, and later stages are copied from global memory.
template <class Shape>
class MainLoop {
 public:
  using X = typename Shape::X;
  using Weight = typename Shape::Weight;

  __device__ MainLoop(OperandMatrix const& x, OperandMatrix const& weight, int first_m, int first_n, int k,
                      float* shared, WarpPart const& part)
      : copy_x_(x, first_m, k),
        copy_weight_(weight, first_n, k),
        stages_((k + X::kTileK - 1) / X::kTileK),
        shared_(shared) {
    int const first_k = part.slice * Shape::kGroups * kVector;
    own_x_ = X::place_of(part.m + X::line_of(lane_along_m(), 0), first_k);
    own_weight_ = X::kElements + Weight::place_of(part.n + Weight::line_of(lane_along_n(), 0), first_k);
  }

  __device__ void run(Sums<Shape>& sums) {
    CUTFUSE_UNROLL
    for (int stage = 0; stage < Shape::kStages - 1; ++stage) copy_next();
    OperandGroup<X, Shape::kThreadRows> x[2];
    OperandGroup<Weight, kThreadColumns> weight[2];
    begin_stage();
    read(0, x[0], weight[0]);
    CUTFUSE_NO_UNROLL
    for (int stage = 0; stage < stages_; ++stage) {
      CUTFUSE_UNROLL
      for (int group = 0; group < Shape::kGroups; ++group) {
        bool const is_last = group + 1 == Shape::kGroups;
        if (is_last) {
          read_slot_ = read_slot_ + 1 == Shape::kStages ? 0 : read_slot_ + 1;
          begin_stage();
        }
        read(is_last ? 0 : group + 1, x[(group + 1) % 2], weight[(group + 1) % 2]);
        multiply(x[group % 2], weight[group % 2], sums);
      }
    }
    wait_for_stage<0>();
    __syncthreads();
  }

 private:
  // Past the last stage this ends an empty stage, so that wait_for_stage counts on.
  __device__ __forceinline__ void copy_next() {
    if (copied_ < stages_) {
      float* const to = shared_ + write_slot_ * Shape::kStageElements;
      copy_x_(to);
      copy_weight_(to + X::kElements);
    }
    ++copied_;
    write_slot_ = write_slot_ + 1 == Shape::kStages ? 0 : write_slot_ + 1;
    end_stage();
  }

  // Waits until the stage has arrived for all threads and all have read the one before, and copies over that one.
  __device__ __forceinline__ void begin_stage() {
    wait_for_stage<Shape::kStages - 2>();
    __syncthreads();
    copy_next();
  }

  __device__ __forceinline__ void read(int group, OperandGroup<X, Shape::kThreadRows>& x,
                                       OperandGroup<Weight, kThreadColumns>& weight) const {
    float const* const stage = shared_ + read_slot_ * Shape::kStageElements;
    x.read(stage + own_x_ + X::place_of(0, group * kVector));
    weight.read(stage + own_weight_ + Weight::place_of(0, group * kVector));
  }

  OperandCopy<X> copy_x_;
  OperandCopy<Weight> copy_weight_;
  int stages_;
  float* shared_;
  int own_x_;
  int own_weight_;
  int copied_ = 0;
  int write_slot_ = 0;
  int read_slot_ = 0;
};

}  // namespace cutfuse::fma
