// The memory that the launches of a plan hand on to each other: pieces of one workspace.
#pragma once

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {

enum class Memory : int32_t {
  kWorkspace,     // of this call
  kWeightPlanes,  // of the weight's planes, which outlive it
};

struct Piece {
  Memory memory;
  int64_t offset;  // bytes from the memory's beginning
  int64_t bytes;   // 0: there is no such piece
};

constexpr bool overlap(Piece const& a, Piece const& b) {
  return a.memory == b.memory && a.bytes > 0 && b.bytes > 0 && a.offset < b.offset + b.bytes &&
         b.offset < a.offset + a.bytes;
}

// What a pass that splits a matrix leaves: see Planes.
struct PlanesPieces {
  Piece values;
  Piece scales;
  Piece flags;
};

// Where a piece may begin, in bytes: a line of the L2 for each of a block of columns, and what PyTorch's allocator
// gives.
constexpr int64_t kPieceAlignment = 256;

// Lays pieces out one behind the other.
class MemoryLayout {
 public:
  explicit MemoryLayout(Memory memory) : memory_(memory) {}

  Piece add(int64_t bytes);

  // Where the next piece begins. Going back to an earlier end writes over what was added since.
  int64_t end() const { return end_; }
  void go_back(int64_t end) { end_ = end; }

  // Of all pieces that were ever added.
  int64_t bytes() const { return bytes_; }

 private:
  Memory memory_;
  int64_t end_ = 0;
  int64_t bytes_ = 0;
};

// The planes of a weight in memory of their own.
struct WeightPlanes {
  PlanesPieces pieces;
  int64_t bytes;
};

WeightPlanes lay_weight_planes(PlanesShape const& shape);

}  // namespace cutfuse
