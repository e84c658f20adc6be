// Copies tiles of an operand from global to shared memory, as they lie: four elements at a time where the operand's
// lines begin at multiples of 16 bytes, and one at a time elsewhere.
#pragma once

#include <cstdint>

#include "gemm/fma_tile.h"

namespace cutfuse::fma {

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

}  // namespace cutfuse::fma
