// A second pass over the steps of a tile, where a product over planes has a result that is not finite. The products of
// the parts of an infinity are NaN, its parts being infinity and zeros: there the high planes alone, without scales,
// give what fp32 gives.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "gemm/sm90_named_barriers.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

// In shared memory: what the consumers of a tile have decided, for its producers. Without `taken` there is no second
// pass. `turn` is a tile's number, modulo 2.
template <bool taken>
struct SecondPass {
  cutlass::arch::ClusterBarrier decided;  // once a tile
  uint32_t again[2];                      // by turns

  CUTLASS_DEVICE void initialize() {
    decided.init(1);
    again[0] = again[1] = 0;
  }

  // A role's steps, once, and again where the tile's consumers say so.
  template <class Pass>
  CUTLASS_DEVICE void for_each_pass(uint32_t turn, Pass const& pass) {
    bool is_first = true;
    bool repeats = true;
    CUTLASS_PRAGMA_NO_UNROLL
    while (repeats) {  // the pass's code is there once
      pass();
      repeats = false;
      if constexpr (taken) {
        if (is_first) decided.wait(turn);
        repeats = is_first && *static_cast<uint32_t volatile*>(&again[turn]) != 0;
        is_first = false;
      }
    }
  }

  // Whether the tile takes a second pass, for its producers too; all consumers call it. What was decided of the tile
  // before all have read by then: the producers as they delivered this one, the consumers as they met in between.
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

  // Of the second pass's sum.
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
