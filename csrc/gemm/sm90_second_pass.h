// A second pass over the K of a tile whose result is not finite. The parts of an infinity are infinity and zeros, whose
// products give NaN where fp32 gives an infinity. The second pass multiplies the high planes alone, without scales,
// which gives the same infinities and NaN as fp32.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "gemm/sm90_named_barriers.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

// Tells the producers, in shared memory, whether the consumers need a second pass over a tile. If `taken` is false, the
// kernel has no second pass. `turn` is the number of the block's tile, modulo 2.
template <bool taken>
struct SecondPass {
  cutlass::arch::ClusterBarrier decided;  // completes once for each tile
  uint32_t again[2];                      // the decision for even and for odd tiles

  CUTLASS_DEVICE void initialize() {
    decided.init(1);
    again[0] = again[1] = 0;
  }

  // Runs `pass` once, and a second time if the consumers have decided so.
  template <class Pass>
  CUTLASS_DEVICE void for_each_pass(uint32_t turn, Pass const& pass) {
    bool is_first = true;
    bool repeats = true;
    CUTLASS_PRAGMA_NO_UNROLL
    while (repeats) {  // a loop, so that the code of the pass is inlined once
      pass();
      repeats = false;
      if constexpr (taken) {
        if (is_first) decided.wait(turn);
        repeats = is_first && *static_cast<uint32_t volatile*>(&again[turn]) != 0;
        is_first = false;
      }
    }
  }

  // All consumers call it. Decides whether the tile needs a second pass, and tells the producers. It clears the
  // decision for the tile before this one, which nobody reads any more: the producers have loaded this tile, and the
  // consumers have passed a barrier since.
  template <class Accumulator>
  CUTLASS_DEVICE bool decide(int thread, Accumulator const& total, uint32_t turn) {
    uint32_t largest = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < decltype(cute::size(total))::value; ++i) {
      largest = cute::max(largest, split_math::magnitude_of(total(i)));
    }
    if (!split_math::is_finite(largest)) again[turn] = 1;
    if (thread == 0) again[turn ^ 1] = 0;
    synchronize_consumers();
    bool const repeats = *static_cast<uint32_t volatile*>(&again[turn]) != 0;
    if (thread == 0) decided.arrive();
    return repeats;
  }

  // Copies those elements of `sum`, the result of the second pass, to `total` that are not finite.
  template <class Accumulator>
  CUTLASS_DEVICE static void take_not_finite(Accumulator const& sum, Accumulator& total) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < decltype(cute::size(sum))::value; ++i) {
      if (!split_math::is_finite(split_math::magnitude_of(sum(i)))) total(i) = sum(i);
    }
  }
};

}  // namespace sm90
}  // namespace cutfuse
