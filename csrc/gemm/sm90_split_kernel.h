// The kernel around SplitMainloop. It has persistent thread blocks without clusters and CUTLASS's epilogue. Where there
// are fewer tiles than multiprocessors, it cuts K into slices that several blocks multiply.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "gemm/sm90_scheduling.h"
#include "gemm/sm90_split_mainloop.h"
#include "split/kernels.h"

namespace cutfuse {
namespace sm90 {

template <class Mainloop, class Epilogue>
struct SplitKernel {
  using CollectiveMainloop = Mainloop;
  using CollectiveEpilogue = Epilogue;
  using TiledMma = typename Mainloop::TiledMma;
  using ElementD = typename Epilogue::ElementD;
  using ProblemShape = cute::Shape<int, int, int, int>;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;

  // One warpgroup of producers, in which one warp loads A and one loads B, and two of consumers.
  static constexpr int kWarpGroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr uint32_t MaxThreadsPerBlock = 3 * kWarpGroup;
  static constexpr uint32_t MinBlocksPerMultiprocessor = 1;
  // Registers of a thread. The three warpgroups together may not have more than a multiprocessor's 65536.
  static constexpr uint32_t kProducerRegisters = 24;
  static constexpr uint32_t kConsumerRegisters = 240;

  struct SharedStorage {
    typename Mainloop::SharedStorage mainloop;
    typename Epilogue::TensorStorage epilogue;
    alignas(16) typename Epilogue::PipelineStorage epilogue_pipeline;
    uint32_t is_last_slice;
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage);
  static_assert(Mainloop::kTileM == TileOrder::kTile && Mainloop::kTileN == TileOrder::kTile,
                "tiles as they are ordered");

  struct Arguments {
    ProblemShape problem_shape;
    typename Mainloop::Arguments mainloop;
    typename Epilogue::Arguments epilogue;
    int multiprocessors;
    KSlices slices;
    SplitGuard guard;
    SplitRun run;
  };

  struct Params {
    ProblemShape problem_shape;
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
    TileOrder order;
    KSlices slices;
    SplitGuard guard;
    SplitRun run;
    int blocks;
  };

  static Params to_underlying_arguments(Arguments const& arguments, void*) {
    auto const [m, n, k, l] = arguments.problem_shape;
    TileOrder const order = TileOrder::make(m, n, k, arguments.slices.count);
    return {arguments.problem_shape,
            Mainloop::make_params(m, n, k, arguments.mainloop),
            Epilogue::to_underlying_arguments(arguments.problem_shape, arguments.epilogue, nullptr),
            order,
            arguments.slices,
            arguments.guard,
            arguments.run,
            cute::min(order.units(), arguments.multiprocessors)};
  }

  static dim3 get_grid_shape(Params const& params) { return dim3(params.blocks); }
  static dim3 get_block_shape() { return dim3(MaxThreadsPerBlock); }

  // All threads of the block call it. The guard gives the same answer to every block of the grid.
  CUTLASS_DEVICE void operator()(Params const& params, char* shared_memory) const {
    auto& storage = *reinterpret_cast<SharedStorage*>(shared_memory);
    if (threadIdx.x == 0) {
      Mainloop::initialize(storage.mainloop, params.mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue);
    }
    wait_for_previous_kernel();
    bool const tripped = guard_trips(params.guard);
    bool const runs = params.run == SplitRun::kAlways || tripped == (params.run == SplitRun::kIfTripped);
    Mainloop::initialize_flags(params.mainloop);
    if (!runs) return;
    __syncthreads();
    if (cutlass::canonical_warp_group_idx() == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      produce(params, storage.mainloop);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, storage);
    }
  }

 private:
  CUTLASS_DEVICE static void produce(Params const& params, typename Mainloop::SharedStorage& storage) {
    int const warp = cutlass::canonical_warp_idx_sync();  // warps 0 and 1 of the first warpgroup load
    if (warp > 1 || !cute::elect_one_sync()) return;
    auto progress = Mainloop::producer_start();
    for (int unit = blockIdx.x; unit < params.order.units(); unit += gridDim.x) {
      TileSlice const work = params.order.at(unit);
      if (warp == 0) {
        Mainloop::load_a(params.mainloop, storage, work.m, work.steps, progress);
      } else {
        Mainloop::load_b(params.mainloop, storage, work.n, work.steps, progress);
      }
    }
  }

  CUTLASS_DEVICE static void consume(Params const& params, SharedStorage& storage) {
    int const thread = threadIdx.x - kWarpGroup;
    using LoadPipeline = typename Epilogue::LoadPipeline;
    using StorePipeline = typename Epilogue::StorePipeline;
    typename LoadPipeline::Params load_params;  // CUTLASS's pipeline for a source operand, which is not used: the
                                                // epilogue program loads its operands itself
    load_params.role = LoadPipeline::ThreadCategory::Consumer;
    load_params.dst_blockid = 0;
    load_params.producer_arv_count = cutlass::NumThreadsPerWarp;
    load_params.consumer_arv_count = kConsumerThreads;
    LoadPipeline load_pipeline(storage.epilogue_pipeline, load_params);
    typename StorePipeline::Params store_params;
    store_params.always_wait = true;
    StorePipeline store_pipeline(store_params);
    typename Epilogue::LoadPipelineState loaded;
    auto stored = cutlass::make_producer_start_state<StorePipeline>();
    Epilogue epilogue(params.epilogue, storage.epilogue);

    TiledMma mma;
    typename Mainloop::Progress progress;
    bool stores = false;
    int64_t elements = 0;
    ConsumerTurns const turns(thread);
    turns.begin();
    for (int unit = blockIdx.x; unit < params.order.units(); unit += gridDim.x) {
      TileSlice const work = params.order.at(unit);
      auto total = cute::partition_fragment_C(mma, cute::take<0, 2>(typename Mainloop::TileShape{}));
      Mainloop::multiply(storage.mainloop, work.steps, thread, turns, total, progress);
      elements += Mainloop::elements_of(params.mainloop, work);
      if (!add_slices(params, storage, work, thread, total)) continue;
      auto const next = epilogue.store(load_pipeline, loaded, store_pipeline, stored, params.problem_shape,
                                       typename Mainloop::TileShape{}, cute::make_coord(work.m, work.n, cute::_, 0),
                                       total, mma, thread, storage.epilogue);
      loaded = cute::get<0>(next);
      stored = cute::get<1>(next);
      stores = true;
    }
    turns.end();
    Mainloop::store_flags(params.mainloop, storage.mainloop, thread, elements);
    if (stores) epilogue.store_tail(load_pipeline, loaded, store_pipeline, stored);
  }

  // For slices of K. The block that arrives last at a tile adds the sums of all slices, in their order, so that the
  // result does not depend on which block that is. The others store theirs. Returns whether `total` is the tile's sum.
  template <class Accumulator>
  CUTLASS_DEVICE static bool add_slices(Params const& params, SharedStorage& storage, TileSlice const& work, int thread,
                                        Accumulator& total) {
    int const slices = params.slices.count;
    if (slices == 1) return true;
    constexpr int kValues = decltype(cute::size(total))::value;
    constexpr int kThreads = kConsumerThreads;
    float* const sums = params.slices.sums + int64_t{work.tile} * slices * kValues * kThreads + thread;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) __stcg(sums + (work.slice * kValues + i) * kThreads, total(i));
    __threadfence();
    synchronize_consumers();
    if (thread == 0) storage.is_last_slice = atomicAdd(params.slices.arrived + work.tile, 1) == slices - 1;
    synchronize_consumers();
    if (!*static_cast<uint32_t volatile*>(&storage.is_last_slice)) return false;
    __threadfence();
    cute::clear(total);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int slice = 0; slice < slices; ++slice) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) total(i) += __ldcg(sums + (slice * kValues + i) * kThreads);
    }
    return true;
  }
};

}  // namespace sm90
}  // namespace cutfuse
