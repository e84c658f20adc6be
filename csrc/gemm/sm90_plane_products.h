// Products of planes of 16-bit parts (see split/planes.h) on tensor cores: the layouts in shared memory, the
// instructions, and the order of the products in one iteration of K.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>

#include "split/planes.h"

namespace cutfuse {
namespace sm90 {

template <SplitScheme scheme>
struct SplitElement {
  using type = cutlass::half_t;
};
template <>
struct SplitElement<SplitScheme::kSplit6> {
  using type = cutlass::bfloat16_t;
};

// wgmma takes only its first operand from registers. If the parts of the weight are in registers, the weight is the
// first operand and the tile of the result is transposed: its first dimension is the weight's rows.
template <SplitScheme scheme, class Tile, bool weight_in_registers>
struct PlaneProducts {
  static constexpr int kPlanes = plane_count(scheme);
  using Element = typename SplitElement<scheme>::type;

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

}  // namespace sm90
}  // namespace cutfuse
