#include "plan/workspace.h"

#include <algorithm>

#include "common/ceil_divide.h"

namespace cutfuse {

Piece MemoryLayout::add(int64_t bytes) {
  Piece const piece = {memory_, end_, bytes};
  end_ += round_up(bytes, kPieceAlignment);
  bytes_ = std::max(bytes_, end_);
  return piece;
}

WeightPlanes lay_weight_planes(PlanesShape const& shape) {
  MemoryLayout layout(Memory::kWeightPlanes);
  Piece const values = layout.add(shape.value_bytes);
  Piece const scales = layout.add(shape.scale_bytes);
  Piece const flags = layout.add(shape.flag_bytes);
  return {{values, scales, flags}, layout.bytes()};
}

}  // namespace cutfuse
