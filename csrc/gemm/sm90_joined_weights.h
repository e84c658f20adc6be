// What a kernel reads of several weights whose products lie side by side in one result: a main loop's parameters for
// each weight, of which a tile's column chooses one, and a bias for each.
#pragma once

#include <cutlass/cutlass.h>

#include <cstdint>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp>

#include "gemm/gemm_launch.h"

namespace cutfuse {
namespace sm90 {

// The weight of all other kernels: the main loop's parameters are those of the whole problem.
struct OneWeight {
  template <class Base>
  using Params = typename Base::Params;

  template <class Mainloop, class Params>
  CUTLASS_DEVICE static void prefetch(Params const& params) {
    Mainloop::prefetch_tma_descriptors(params.mainloop);
  }
  template <class Params>
  CUTLASS_DEVICE static auto const& mainloop_of(Params const& params, int) {
    return params.mainloop;
  }
  template <class Params, class Tile>
  CUTLASS_DEVICE static auto tile_of(Params const&, Tile const& tile) {
    return tile;
  }
};

// The columns of tiles at which weights begin; INT32_MAX for those that are not there.
struct WeightStarts {
  int32_t items[kMostJoinedWeights];

  CUTLASS_HOST_DEVICE int weight_at(int column) const {
    int index = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int next = 1; next < kMostJoinedWeights; ++next) index += column >= items[next] ? 1 : 0;
    return index;
  }
};

struct SeveralWeights {
  template <class Base>
  struct Params : Base::Params {
    WeightStarts starts;
    typename Base::CollectiveMainloop::Params mainloops[kMostJoinedWeights];
  };

  template <class Mainloop, class Params>
  CUTLASS_DEVICE static void prefetch(Params const& params) {
    CUTLASS_PRAGMA_UNROLL
    for (auto const& mainloop : params.mainloops) Mainloop::prefetch_tma_descriptors(mainloop);
  }
  template <class Params>
  CUTLASS_DEVICE static auto const& mainloop_of(Params const& params, int column) {
    return params.mainloops[params.starts.weight_at(column)];
  }
  template <class Params, class Tile>
  CUTLASS_DEVICE static auto tile_of(Params const& params, Tile const& tile) {
    int const column = cute::get<1>(tile);
    int const first = params.starts.items[params.starts.weight_at(column)];
    return cute::make_coord(cute::get<0>(tile), column - first, cute::get<2>(tile), cute::get<3>(tile));
  }
};

// CUTLASS's row broadcast of a bias for each weight.
template <class Tile, class Element, int alignment>
struct JoinedBias : cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, Element, float,
                                                                cute::Stride<cute::_0, cute::_1, int64_t>, alignment> {
  using Base = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, Element, float,
                                                           cute::Stride<cute::_0, cute::_1, int64_t>, alignment>;
  using SharedStorage = typename Base::SharedStorage;

  struct Arguments {
    Element const* biases[kMostJoinedWeights];  // null for none
    WeightStarts starts;
  };
  using Params = Arguments;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& arguments, void*) {
    return arguments;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE JoinedBias() {}
  CUTLASS_HOST_DEVICE JoinedBias(Params const& given, SharedStorage const& shared)
      : Base(typename Base::Params{}, shared), joined(&given) {}

  // The tile's bias, as if that of its weight went on to all columns.
  template <bool kReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    int const column = cute::get<1>(args.tile_coord_mnkl);
    int const index = joined->starts.weight_at(column);
    Element const* const bias = joined->biases[index];
    int64_t const skipped = int64_t{joined->starts.items[index]} * cute::size<1>(Tile{});
    Base::params.ptr_row = bias == nullptr ? nullptr : bias - skipped;
    return Base::template get_consumer_store_callbacks<kReferenceSource>(args);
  }

  Params const* joined = nullptr;
};

}  // namespace sm90
}  // namespace cutfuse
