// The kernel of the pingpong schedule: two consumer warpgroups compute tiles in turns, and the epilogue of one runs
// beside the main loop of the other. CUTLASS's kernel lets the epilogues take turns as well, because they share
// buffers: an epilogue that takes longer than a main loop then delays the next one. Here each warpgroup has its own
// buffers, barriers and loads of C (50176x2048x512 bf16 with gelu, H200: 219 us, with turns 250).
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include <cstdint>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "common/launch.h"
#include "epilogue/sm90_program_visitor.h"
#include "gemm/gemm_launch.h"
#include "gemm/sm90_scheduling.h"
#include "gemm/sm90_tile_store.h"

namespace cutfuse {
namespace sm90 {

// What a kernel reads of several weights whose products lie side by side in one result: a main loop's parameters for
// each weight, of which a tile's column chooses one, and a bias for each.

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

template <class Element>
struct JoinedBiases {
  Element const* items[kMostJoinedWeights];  // null for none
  WeightStarts starts;
};

template <class Tile, class Element, int alignment>
using OneBias = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, Element, float,
                                                            cute::Stride<cute::_0, cute::_1, int64_t>, alignment>;

// CUTLASS's row broadcast of a bias for each weight.
template <class Tile, class Element, int alignment>
struct JoinedBias : NodeOf<OneBias<Tile, Element, alignment>, JoinedBiases<Element>> {
  using Base = OneBias<Tile, Element, alignment>;
  using SharedStorage = typename Base::SharedStorage;
  using Params = JoinedBiases<Element>;

  CUTLASS_HOST_DEVICE JoinedBias() {}
  CUTLASS_HOST_DEVICE JoinedBias(Params const& given, SharedStorage const& shared)
      : NodeOf<Base, Params>(typename Base::Params{}, shared), joined(&given) {}

  // The tile's bias, as if that of its weight went on to all columns.
  template <bool kReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    int const column = cute::get<1>(args.tile_coord_mnkl);
    int const index = joined->starts.weight_at(column);
    Element const* const bias = joined->items[index];
    int64_t const skipped = int64_t{joined->starts.items[index]} * cute::size<1>(Tile{});
    Base::params.ptr_row = bias == nullptr ? nullptr : bias - skipped;
    return Base::template get_consumer_store_callbacks<kReferenceSource>(args);
  }

  Params const* joined = nullptr;
};

// Weight: whether the kernel reads one weight or several.
template <class Mainloop, class Epilogue, class Weight = OneWeight>
struct PingpongKernel : cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                             cutlass::gemm::PersistentScheduler> {
  using Base = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                    cutlass::gemm::PersistentScheduler>;
  using Params = typename Weight::template Params<Base>;
  using Cluster = typename Base::ClusterShape;
  using Tile = typename Base::TileShape;
  using MainloopPipeline = typename Mainloop::MainloopPipeline;
  using LoadPipeline = typename Epilogue::LoadPipeline;
  using Turns = cutlass::OrderedSequenceBarrier<1, Base::NumMmaWarpGroups>;

  static constexpr int kConsumers = Base::NumMmaWarpGroups;

  struct SharedStorage {
    struct Tensors {
      typename Epilogue::TensorStorage epilogue[kConsumers];
      typename Mainloop::TensorStorage mainloop;
    } tensors;
    alignas(16) typename Mainloop::PipelineStorage mainloop;
    alignas(16) typename Epilogue::PipelineStorage loads[kConsumers];
    alignas(16) typename Turns::SharedStorage turns;
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage);

  // All threads of the block call it.
  CUTLASS_DEVICE void operator()(Params const& params, char* shared_memory) const {
    auto& storage = *reinterpret_cast<SharedStorage*>(shared_memory);
    Role const role;
    if (threadIdx.x == 0) {
      Weight::template prefetch<Mainloop>(params);
      Epilogue::prefetch_tma_descriptors(params.epilogue);
    }
    MainloopPipeline mainloop(storage.mainloop, mainloop_params(params, role), Cluster{});
    LoadPipeline const loads[kConsumers] = {LoadPipeline(storage.loads[0], load_params(params, role)),
                                            LoadPipeline(storage.loads[1], load_params(params, role))};
    typename Turns::Params turns_params;
    turns_params.group_id = role.consumer;
    turns_params.group_size = cutlass::NumThreadsPerWarpGroup;
    Turns turns(storage.turns, turns_params);
    synchronize_cluster();
    wait_for_previous_kernel();
    if (role.is_producer) {
      cutlass::arch::warpgroup_reg_dealloc<Base::LoadRegisterRequirement>();
      if (role.warp == kMainloopWarp) load_operands(params, storage, mainloop);
      if (role.warp == kFirstSourceWarp) load_source(params, storage, loads[0], 0);
      if (role.warp == kFirstSourceWarp + 1) load_source(params, storage, loads[1], 1);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Base::MmaRegisterRequirement>();
      consume(params, storage, mainloop, role.consumer == 0 ? loads[0] : loads[1], turns, role);
    }
  }

 private:
  // Warps of the producer warpgroup: one loads A and B, and one for each consumer loads C.
  static constexpr int kMainloopWarp = 0;
  static constexpr int kFirstSourceWarp = 2;

  struct Role {
    bool is_producer = cutlass::canonical_warp_group_idx() == 0;
    int consumer = cutlass::canonical_warp_group_idx() - 1;
    int warp = cutlass::canonical_warp_idx_sync() % cutlass::NumWarpsPerWarpGroup;
    int thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;

    CUTLASS_DEVICE Role() {}
    CUTLASS_DEVICE bool loads_source() const { return is_producer && warp >= kFirstSourceWarp; }
  };

  CUTLASS_DEVICE static auto mainloop_params(Params const& params, Role const& role) {
    using Category = typename MainloopPipeline::ThreadCategory;
    typename MainloopPipeline::Params made;
    if (!role.is_producer) made.role = Category::Consumer;
    if (role.is_producer && role.warp == kMainloopWarp) made.role = Category::Producer;
    made.is_leader = role.thread == 0;
    made.num_consumers = cutlass::NumThreadsPerWarpGroup;
    made.num_producers = Base::NumProducerThreads;
    made.transaction_bytes = params.mainloop.tma_transaction_bytes;
    return made;
  }

  CUTLASS_DEVICE static auto load_params(Params const& params, Role const& role) {
    using Category = typename LoadPipeline::ThreadCategory;
    typename LoadPipeline::Params made;
    if (!role.is_producer) made.role = Category::Consumer;
    if (role.loads_source()) made.role = Category::Producer;
    made.dst_blockid = cute::block_rank_in_cluster();
    made.producer_arv_count = cutlass::NumThreadsPerWarp;
    made.consumer_arv_count = cutlass::NumThreadsPerWarpGroup;
    made.transaction_bytes = params.epilogue.tma_transaction_bytes;
    return made;
  }

  // Behind it, every block of the cluster sees the others' barriers.
  CUTLASS_DEVICE static void synchronize_cluster() {
    if constexpr (cute::size(Cluster{}) > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // Calls function(coordinates of a tile) for the block's tiles, from the one at `first` on every `step`-th.
  template <class Function>
  CUTLASS_DEVICE static void for_each_tile(Params const& params, int first, int step, Function const& function) {
    typename Base::TileScheduler scheduler{params.scheduler};
    if (first > 0) scheduler.advance_to_next_work(first);
    for (auto work = scheduler.initial_work_tile_info(Cluster{}); work.is_valid();) {
      function(cute::make_coord(work.M_idx, work.N_idx, cute::_, work.L_idx));
      scheduler.advance_to_next_work(step);
      work = scheduler.get_current_work();
    }
  }

  CUTLASS_DEVICE static auto problem_shape_of(Params const& params) {
    return cute::append<4>(params.problem_shape, cute::_1{});
  }

  CUTLASS_DEVICE static void load_operands(Params const& params, SharedStorage& storage, MainloopPipeline& pipeline) {
    Mainloop mainloop;
    auto const inputs = mainloop.load_init(problem_shape_of(params), params.mainloop);
    auto const shape_k = cute::shape<3>(cute::get<0>(inputs));
    int const steps = cute::size(shape_k);
    auto state = cutlass::make_producer_start_state<MainloopPipeline>();
    for_each_tile(params, 0, 1, [&](auto const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
      mainloop.load(Weight::mainloop_of(params, cute::get<1>(tile)), pipeline, state, inputs,
                    Weight::tile_of(params, tile), cute::make_coord_iterator(shape_k), steps,
                    cutlass::canonical_lane_idx(), cute::block_rank_in_cluster(), storage.tensors.mainloop);
      state.advance(steps);
    });
    mainloop.load_tail(pipeline, state);
  }

  // Loads C for the tiles of one consumer.
  CUTLASS_DEVICE static void load_source(Params const& params, SharedStorage& storage, LoadPipeline const& pipeline,
                                         int consumer) {
    Epilogue epilogue(params.epilogue, storage.tensors.epilogue[consumer]);
    if (!epilogue.is_producer_load_needed()) return;
    auto state = cutlass::make_producer_start_state<LoadPipeline>();
    for_each_tile(params, consumer, kConsumers, [&](auto const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
      state = epilogue.load(pipeline, state, problem_shape_of(params), Tile{}, tile, typename Base::TiledMma{},
                            cutlass::canonical_lane_idx(), storage.tensors.epilogue[consumer]);
    });
    epilogue.load_tail(pipeline, state);
  }

  CUTLASS_DEVICE static void consume(Params const& params, SharedStorage& storage, MainloopPipeline& pipeline,
                                     LoadPipeline const& loads, Turns& turns, Role const& role) {
    Mainloop mainloop;
    typename Base::TiledMma mma;
    TileStore<Epilogue> store(params.epilogue, storage.tensors.epilogue[role.consumer], loads,
                              kFirstStoreBarrier + role.consumer, role.thread);
    int const steps = cute::size<3>(cute::get<0>(mainloop.load_init(problem_shape_of(params), params.mainloop)));
    typename Mainloop::PipelineState state;
    state.advance(role.consumer * steps);
    for_each_tile(params, role.consumer, kConsumers, [&](auto const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
      store(problem_shape_of(params), tile, mma, [&](auto& accumulators) CUTLASS_LAMBDA_FUNC_INLINE {
        turns.wait();
        mainloop.mma(pipeline, state, accumulators, steps, role.thread, storage.tensors.mainloop, params.mainloop);
        turns.arrive();
        mainloop.mma_tail(pipeline, state, steps);
        state.advance(kConsumers * steps);
      });
    });
    store.finish();
  }
};

}  // namespace sm90
}  // namespace cutfuse
