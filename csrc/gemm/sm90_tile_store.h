// How a warpgroup that computes tiles alone stores them: CUTLASS's epilogue but for its loop over subtiles, which uses
// a named barrier of the warpgroup's own and one barrier a subtile instead of two. CUTLASS's loop uses the same barrier
// in every warpgroup, so that only one of them could be in its epilogue.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>

#include "gemm/sm90_scheduling.h"

namespace cutfuse {
namespace sm90 {

// Collective: CUTLASS's epilogue, which loads C and whose parameters and shared memory these are.
template <class Collective>
class TileStore {
  using Policy = typename Collective::DispatchPolicy;
  using ElementC = typename Collective::ElementC;
  using ElementD = typename Collective::ElementD;
  using FusionCallbacks = typename Collective::FusionCallbacks;
  using Subtile = typename Collective::EpilogueTile;
  using Tile = decltype(cute::take<0, 2>(typename Collective::CtaTileMNK{}));
  using LoadPipeline = typename Collective::LoadPipeline;
  using LoadState = typename Collective::LoadPipelineState;

  static constexpr bool kStores = !cute::is_void_v<ElementD>;
  static constexpr bool kLoads = !cute::is_void_v<ElementC>;
  // A subtile of the result takes the place of C's, in the same buffer.
  static constexpr int kBuffers = kLoads ? Policy::StagesC : Policy::StagesD;
  static_assert(!kLoads || Policy::ReuseSmemC, "the result takes C's place");
  static_assert(kBuffers >= 2, "while the copy engine reads one buffer, the next is written");
  static_assert(!kStores || cute::is_same_v<ElementD, typename FusionCallbacks::ElementAux>);
  static_assert(cute::is_void_v<typename Collective::CopyOpR2R>, "fragments are stored as they are");

  using Element = typename FusionCallbacks::ElementAux;  // ElementD where there is one
  template <class Atom>
  using Buffers = decltype(cute::tile_to_shape(
      Atom{}, cute::make_shape(cute::size<0>(Subtile{}), cute::size<1>(Subtile{}), cute::Int<kBuffers>{})));
  using LayoutD = Buffers<typename Collective::SmemLayoutAtomD>;
  using LayoutC = Buffers<typename Collective::SmemLayoutAtomC>;
  static_assert(!kLoads || cute::is_same_v<LayoutC, LayoutD>, "a warp writes what it alone has read");

 public:
  using Params = typename Collective::Params;
  using Storage = typename Collective::TensorStorage;

  // barrier: a named barrier that no other warpgroup uses. thread: of the warpgroup's.
  CUTLASS_DEVICE TileStore(Params const& params, Storage& storage, LoadPipeline const& loads, uint32_t barrier,
                           int thread)
      : params_(params),
        storage_(storage),
        callbacks_(params.thread, storage.thread),
        loads_(loads),
        barrier_(barrier),
        thread_(thread),
        issues_(thread / cutlass::NumThreadsPerWarp == 0) {}

  // Computes a tile: product(accumulators), and behind it the epilogue, whose first loads are on their way before the
  // product begins. The copy engine may still read the last subtile when it returns.
  template <class ProblemShape, class TileCoord, class TiledMma, class Product>
  CUTLASS_DEVICE void operator()(ProblemShape const& problem_shape, TileCoord const& tile_coord, TiledMma const& mma,
                                 Product const& product) {
    using namespace cute;
    auto const [rows, columns, k, l] = problem_shape;
    auto const [tile_m, tile_n, tile_k, tile_l] = tile_coord;

    auto const copy_atom = make_tiled_copy_C_atom(typename Collective::CopyAtomC{}, mma);
    auto const to_shared = make_tiled_copy_S(Copy_Atom<typename Collective::CopyOpR2S, Element>{}, copy_atom);
    auto const own = to_shared.get_slice(thread_);
    Tensor buffers = as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(storage_.collective.smem_D.begin()), LayoutD{}));  // (SUBTILE_M,SUBTILE_N,BUFFER)
    Tensor own_buffers = own.partition_D(buffers);                                   // (R2S,R2S_M,R2S_N,BUFFER)

    auto accumulators = partition_fragment_C(mma, Tile{});
    constexpr int kFragment = Policy::FragmentSize;
    Tensor fragments = recast<cutlass::Array<float, kFragment>>(own.retile_S(accumulators));  // (FRAGMENT,MMA_M,MMA_N)
    Tensor result = make_tensor<Element>(take<0, 3>(shape(own.partition_S(buffers))));
    Tensor result_fragments = recast<cutlass::Array<Element, kFragment>>(result);
    constexpr int kFragments = decltype(size(result_fragments))::value;
    constexpr int kMmaN = size<1>(Tile{}) / decltype(size<2>(fragments))::value;
    constexpr int kSubtilesOfMma = kMmaN / size<1>(Subtile{});
    static_assert(size<0>(Tile{}) / decltype(size<1>(fragments))::value == size<0>(Subtile{}) && kSubtilesOfMma > 0,
                  "a subtile has the rows of one matrix instruction, and not more of its columns");

    // C's subtile as this thread's fragment has it.
    auto const from_shared = make_tiled_copy_S(Copy_Atom<typename Collective::CopyOpS2R, Element>{}, copy_atom);
    auto const own_source = from_shared.get_slice(thread_);
    Tensor source_buffers = own_source.partition_S(buffers);
    Tensor source = make_tensor<Element>(result.layout());
    Tensor source_copy = own_source.retile_D(source);

    Tensor destination = params_.tma_store_d.get_tma_tensor(make_shape(rows, columns, l));
    Tensor subtiles =
        flat_divide(local_tile(coalesce(destination, Tile{}), Tile{}, make_coord(tile_m, tile_n, tile_l)), Subtile{});
    auto const store = params_.tma_store_d.get_slice(_0{});
    Tensor stored_from = store.partition_S(buffers);  // (S2G,S2G_M,S2G_N,BUFFER)
    Tensor stored_to = store.partition_D(subtiles);   // (S2G,S2G_M,S2G_N,SUBTILES_M,SUBTILES_N)

    // Coordinates of the tile's and of this thread's elements, and how far the matrix goes beyond the first ones.
    Tensor tile_coords =
        local_tile(make_identity_tensor(make_shape(rows, columns)), Tile{}, make_coord(tile_m, tile_n));
    Tensor own_coords = own.partition_S(flat_divide(tile_coords, Subtile{}));
    Tensor relative_tile_coords = make_coord_tensor(tile_coords.layout());
    Tensor relative_own_coords = make_coord_tensor(own_coords.layout());
    auto const tile_residue = make_coord(rows, columns) - tile_coords(_0{});
    auto const own_residue = make_coord(rows, columns) - own_coords(_0{});
    auto const arguments = cutlass::epilogue::fusion::detail::ConsumerStoreArgs(
        problem_shape, typename Collective::CtaTileMNK{}, tile_coord, mma, Subtile{}, to_shared, relative_tile_coords,
        tile_residue, relative_own_coords, own_residue, source, thread_);
    auto callbacks = callbacks_.template get_consumer_store_callbacks<true>(arguments);
    bool const reads_source = this->reads_source();

    callbacks.begin();
    product(accumulators);
    synchronize();
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < size<4>(own_coords); ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < size<3>(own_coords); ++m) {
        callbacks.begin_loop(m, n);
        if constexpr (kLoads) {
          if (reads_source) {
            loads_.consumer_wait(loaded_);
            copy(from_shared, source_buffers(_, _, _, buffer_.index()), source_copy);
            ++loaded_;
          }
        }
        callbacks.previsit(m, n, 0, reads_source);
        int const first = n % kSubtilesOfMma * kFragments;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kFragments; ++i) {
          result_fragments(i) = callbacks.visit(fragments(first + i, m, n / kSubtilesOfMma), i, m, n);
        }
        if constexpr (kStores) {
          copy(to_shared, result, own_buffers(_, _, _, buffer_.index()));
          hand_to_copy_engine(stored_from(_, _, _, buffer_.index()), stored_to(_, _, _, m, n));
          if (reads_source && stored_any_) release_source();
          stored_any_ = true;
          ++buffer_;
        }
      }
    }
    callbacks.end();
    // The next tile's callbacks write what those of slower warps may still read.
    if constexpr (!kStores) synchronize();
  }

  // Waits until the copy engine has read all subtiles: behind the last tile.
  CUTLASS_DEVICE void finish() {
    if constexpr (kStores) {
      if (issues_) cute::tma_store_wait<0>();
      if (reads_source() && stored_any_) {
        synchronize();
        release_source();
      }
    }
  }

 private:
  CUTLASS_DEVICE bool reads_source() const { return kLoads && callbacks_.is_producer_load_needed(); }

  CUTLASS_DEVICE void synchronize() const {
    cutlass::arch::NamedBarrier::sync(cutlass::NumThreadsPerWarpGroup, barrier_);
  }

  // Stores a subtile that all threads have written. Behind the barrier, the copy engine has read the one before, so
  // that its buffer may be written for the next.
  template <class From, class To>
  CUTLASS_DEVICE void hand_to_copy_engine(From const& from, To to) {
    cute::tma_store_fence();
    if (issues_) cute::tma_store_wait<0>();
    synchronize();
    if (issues_) {
      cute::copy(params_.tma_store_d, from, to);
      cute::tma_store_arrive();
    }
  }

  // The earliest buffer that is not released, whose subtile the copy engine has read.
  CUTLASS_DEVICE void release_source() {
    loads_.consumer_release(released_);
    ++released_;
  }

  Params const& params_;
  Storage& storage_;
  FusionCallbacks callbacks_;
  LoadPipeline loads_;
  LoadState loaded_;
  LoadState released_;
  cutlass::PipelineState<kBuffers> buffer_;
  uint32_t barrier_;
  int thread_;
  bool issues_;
  bool stored_any_ = false;
};

}  // namespace sm90
}  // namespace cutfuse
