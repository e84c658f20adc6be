// The main loop of the fp32 kernels on CUDA cores.
#pragma once

#include "gemm/fma_operand_copy.h"

namespace cutfuse::fma {

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
