// Products of planes of 16-bit parts (see split/planes.h) on tensor cores: the layouts in shared memory, the
// instructions, and the order of the products in one iteration of K.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cstdint>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>

#include "gemm/sm90_scheduling.h"
#include "split/planes.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

template <SplitScheme scheme>
using SplitElement = cute::conditional_t<scheme == SplitScheme::kSplit3, cutlass::half_t, cutlass::bfloat16_t>;

// wgmma takes only its first operand from registers. If the parts of the weight are in registers, the weight is the
// first operand and the tile of the result is transposed: its first dimension is the weight's rows.
template <SplitScheme scheme, class Tile, bool weight_in_registers>
struct PlaneProducts {
  static constexpr int kPlanes = plane_count(scheme);
  using Element = SplitElement<scheme>;

  // Layouts, copies and instructions are those of CUTLASS's own main loop for this tile.
  using Plain = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, 8, Element,
      cutlass::layout::ColumnMajor, 8, float, Tile, cute::Shape<cute::_1, cute::_1, cute::_1>,
      cutlass::gemm::collective::StageCount<2>, cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  using TiledMma = typename Plain::TiledMma;  // the layout of accumulators that the epilogue expects
  using FromRegisters = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, Tile, cute::GMMA::Major::K, cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  using Mma = cute::conditional_t<weight_in_registers, FromRegisters, TiledMma>;
  using CopyA = typename Plain::GmemTiledCopyA;
  using CopyB = typename Plain::GmemTiledCopyB;

  // Modes: (rows, K, buffer).
  template <int buffers>
  using LayoutA = decltype(cute::tile_to_shape(
      typename Plain::SmemLayoutAtomA{},
      cute::make_shape(cute::size<0>(Tile{}), cute::size<2>(Tile{}), cute::Int<buffers>{})));
  template <int buffers>
  using LayoutB = decltype(cute::tile_to_shape(
      typename Plain::SmemLayoutAtomB{},
      cute::make_shape(cute::size<1>(Tile{}), cute::size<2>(Tile{}), cute::Int<buffers>{})));

  // The planes of one iteration, as fragments with the modes (instruction, M or N, K, buffer and plane).
  template <class A, class B>
  struct Step {
    A a;
    B b;
    int first_a;  // index of the first plane in the iteration's buffer
    int first_b;
  };
  template <class A, class B>
  CUTLASS_DEVICE static Step<A, B> make_step(A const& a, B const& b, int first_a, int first_b) {
    return {a, b, first_a, first_b};
  }

  // Issues all products of an iteration, the smallest first: the tensor core truncates relative to the sum so far, so
  // it truncates less while the sum is small. finish() waits for the sum.
  template <class A, class B, class Accumulator>
  CUTLASS_DEVICE static void issue_all(Mma& mma, Step<A, B> const& step, Accumulator& sum) {
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    cutlass::warpgroup_fence_operand(sum);
    cutlass::warpgroup_arrive();
    if constexpr (scheme == SplitScheme::kSplit6) {
      issue(mma, step, 0, 2, sum);
      issue(mma, step, 2, 0, sum);
      issue(mma, step, 1, 1, sum);
    }
    issue(mma, step, 0, 1, sum);
    issue(mma, step, 1, 0, sum);
    issue(mma, step, 0, 0, sum);
    cutlass::warpgroup_commit_batch();
  }

  // Adds only the products of the high parts. The sum begins at zero if `mma` says so.
  template <class A, class B, class Accumulator>
  CUTLASS_DEVICE static void add_high(Mma& mma, Step<A, B> const& step, Accumulator& sum) {
    cutlass::warpgroup_fence_operand(sum);
    cutlass::warpgroup_arrive();
    issue(mma, step, 0, 0, sum);
    cutlass::warpgroup_commit_batch();
    finish(sum);
  }

  template <class Accumulator>
  CUTLASS_DEVICE static void finish(Accumulator& sum) {
    cutlass::warpgroup_wait<0>();
    cutlass::warpgroup_fence_operand(sum);
  }

 private:
  template <class A, class B, class Accumulator>
  CUTLASS_DEVICE static void issue(Mma& mma, Step<A, B> const& step, int plane_a, int plane_b, Accumulator& sum) {
    using cute::_;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < decltype(cute::size<2>(step.a))::value; ++k) {
      auto const a = step.a(_, _, k, step.first_a + plane_a);
      auto const b = step.b(_, _, k, step.first_b + plane_b);
      if constexpr (weight_in_registers) {
        cute::gemm(mma, b, a, sum);
      } else {
        cute::gemm(mma, a, b, sum);
      }
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
  }
};

// The scales of one step of a product over planes, and the addition of the step's sum to the fp32 accumulators.

// The scales of a thread's elements, which are in two rows eight apart and in pairs of columns eight apart.
template <int tile_n>
struct TileScales {
  static constexpr int kPairs = tile_n / 8;
  float rows[2];
  float2 columns[kPairs];

  CUTLASS_DEVICE void read_rows(float const* scales) {
    rows[0] = scales[0];
    rows[1] = scales[8];
  }
  CUTLASS_DEVICE void read_columns(float const* scales) {
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) columns[pair] = *reinterpret_cast<float2 const*>(scales + pair * 8);
  }

  // Multiplies by the row's scale first: the product of two scales may overflow although the result does not.
  template <class Accumulator>
  CUTLASS_DEVICE void promote(Accumulator const& sum, Accumulator& total) const {
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < 2; ++row) {
        int const i = pair * 4 + row * 2;
        total(i) = ::fmaf(sum(i) * rows[row], columns[pair].x, total(i));
        total(i + 1) = ::fmaf(sum(i + 1) * rows[row], columns[pair].y, total(i + 1));
      }
    }
  }
};

// Like TileScales, for planes of B whose rows share scales (see scale_rows()): one product of scales then serves four
// elements.
template <int tile_n>
struct SharedTileScales {
  static constexpr int kGroups = tile_n / kSharedScaleRows;
  float products[2][kGroups];  // a row's scale times a group's

  CUTLASS_DEVICE void read(float const* row_scales, float const* group_scales) {
    float const rows[2] = {row_scales[0], row_scales[8]};
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kGroups; first += 4) {
      float4 const loaded = *reinterpret_cast<float4 const*>(group_scales + first);
      float const groups[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) products[i / 4][first + i % 4] = rows[i / 4] * groups[i % 4];
    }
  }

  template <class Accumulator>
  CUTLASS_DEVICE void promote(Accumulator const& sum, Accumulator& total) const {
    static_assert(kSharedScaleRows == 16, "two groups of eight columns");
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < decltype(cute::size(sum))::value; ++i) {
      total(i) = ::fmaf(sum(i), products[i / 2 % 2][i / 8], total(i));
    }
  }
};

// Like TileScales, for transposed tiles, in which all rows of a warp have one scale and each column has its own. The
// warp computes the products of the two together, in shared memory, while the tensor cores compute its sum. Each thread
// then loads those that it needs.
template <int tile_m>
struct WarpTileScales {
  static_assert(tile_m == 128, "four columns for every lane");
  using Products = float[tile_m];

  // The place of a product of scales. A thread's columns, pairs that are eight apart, are contiguous; four lanes have
  // different columns, and their vectors are permuted differently, so that there are no bank conflicts.
  CUTLASS_DEVICE static int place(int lane_of_row, int element) {
    return lane_of_row * (tile_m / 4) + (element ^ lane_of_row * 4);
  }

  CUTLASS_DEVICE static void put(float row_scale, float const* column_scales, Products& products, int lane) {
    float4 const columns = reinterpret_cast<float4 const*>(column_scales)[lane];
    int const owner = lane % 2 * 2;
    int const element = lane / 2 * 2;
    *reinterpret_cast<float2*>(products + place(owner, element)) =
        make_float2(row_scale * columns.x, row_scale * columns.y);
    *reinterpret_cast<float2*>(products + place(owner + 1, element)) =
        make_float2(row_scale * columns.z, row_scale * columns.w);
    __syncwarp();
  }

  template <class Accumulator>
  CUTLASS_DEVICE static void promote(Products const& products, int lane, Accumulator const& sum, Accumulator& total) {
    CUTLASS_PRAGMA_UNROLL
    for (int vector = 0; vector < tile_m / 16; ++vector) {
      float4 const loaded = *reinterpret_cast<float4 const*>(products + place(lane % 4, vector * 4));
      float const columns[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {  // two columns of the first row, then of the second, twice
        int const at = vector * 8 + i;
        total(at) = ::fmaf(sum(at), columns[i / 4 * 2 + i % 2], total(at));
      }
    }
  }
};

// A second pass over the K of a tile whose result is not finite. The parts of an infinity are infinity and zeros, whose
// products give NaN where fp32 gives an infinity. The second pass multiplies the high planes alone, without scales,
// which gives the same infinities and NaN as fp32.

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
