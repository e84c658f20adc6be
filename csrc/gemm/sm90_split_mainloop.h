// CUTLASS's warp-specialised main loop over planes of 16-bit parts (see split/planes.h). A step of K loads every plane
// of both operands once and issues all products of the plan from shared memory. The tensor core truncates where it
// accumulates, so after each step the sum is scaled and added to the fp32 accumulators in registers, rounded to
// nearest: the promotion of DeepSeek-V3's fp8 products, with a scale for each row and block.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "gemm/sm90_convert_step.h"
#include "gemm/sm90_tile_scales.h"
#include "split/planes.h"

namespace cutfuse {
namespace sm90 {

template <SplitPlan plan>
struct SplitElement {
  using type = cutlass::half_t;
};
template <>
struct SplitElement<SplitPlan::kSplit6> {
  using type = cutlass::bfloat16_t;
};

// What CUTLASS's kernel asks of a main loop's policy.
template <int stages, class Cluster>
struct SplitPolicy {
  static constexpr int Stages = stages;
  using ClusterShape = Cluster;
  using ArchTag = cutlass::arch::Sm90;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

// converts_b: B comes as fp32, and the consumers split each step of it in shared memory, in place, while the tensor
// cores multiply the step before.
template <SplitPlan plan, bool converts_b, class Tile, class Cluster, int stages>
struct SplitMainloop {
  static constexpr int kPlanes = plane_count(plan);
  static_assert(!converts_b || plan == SplitPlan::kSplit3, "three planes do not fit where fp32 was");
  static constexpr int kTileM = decltype(cute::size<0>(Tile{}))::value;
  static constexpr int kTileN = decltype(cute::size<1>(Tile{}))::value;
  static_assert(decltype(cute::size<2>(Tile{}))::value == kSplitBlock, "a step of K is a block of one scale");
  static_assert(kTileM == kScaleAlignment && kTileN == kScaleAlignment, "scales are copied for whole tiles");

  using DispatchPolicy = SplitPolicy<stages, Cluster>;
  using TileShape = Tile;
  using ArchTag = typename DispatchPolicy::ArchTag;
  using ElementA = typename SplitElement<plan>::type;
  using ElementB = ElementA;
  using StrideA = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideB = StrideA;
  using ElementAccumulator = float;
  static constexpr int NumProducerThreadEvents = 1;

  // Layouts, copies and instructions are those of CUTLASS's own main loop for this tile.
  using Plain = typename cutlass::gemm::collective::CollectiveBuilder<
      ArchTag, cutlass::arch::OpClassTensorOp, ElementA, cutlass::layout::RowMajor, 8, ElementB,
      cutlass::layout::ColumnMajor, 8, float, Tile, Cluster, cutlass::gemm::collective::StageCount<2>,
      typename DispatchPolicy::Schedule>::CollectiveOp;
  using TiledMma = typename Plain::TiledMma;
  using GmemTiledCopyA = typename Plain::GmemTiledCopyA;
  using GmemTiledCopyB = typename Plain::GmemTiledCopyB;
  using SmemLayoutA = decltype(cute::tile_to_shape(
      typename Plain::SmemLayoutAtomA{},
      cute::make_shape(cute::Int<kTileM>{}, cute::Int<kSplitBlock>{}, cute::Int<stages * kPlanes>{})));
  using SmemLayoutB = decltype(cute::tile_to_shape(
      typename Plain::SmemLayoutAtomB{},
      cute::make_shape(cute::Int<kTileN>{}, cute::Int<kSplitBlock>{}, cute::Int<stages * kPlanes>{})));

  // A step of B as it is copied: planes, or fp32 where the planes will be.
  using SourceB = cute::conditional_t<converts_b, float, ElementB>;
  using SourceLayoutB = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<SourceB>{},
                                                     cute::make_shape(cute::Int<kTileN>{}, cute::Int<kSplitBlock>{})));
  static constexpr int kSourcesB = converts_b ? 1 : kPlanes;
  static constexpr int kStepB = kPlanes * kTileN * kSplitBlock;  // elements of the planes of a step

  using MainloopPipeline = cutlass::PipelineTmaAsync<stages>;
  using PipelineState = cutlass::PipelineState<stages>;

  struct SharedStorage {
    struct TensorStorage : cute::aligned_struct<128, cute::_0> {
      alignas(1024) cute::array_aligned<ElementA, cute::cosize_v<SmemLayoutA>> a;  // swizzles repeat every 1024 bytes
      alignas(1024) cute::array_aligned<ElementB, cute::cosize_v<SmemLayoutB>> b;
      alignas(128) float scales_a[stages][kTileM];
      alignas(128) float scales_b[stages][kTileN];
      uint32_t not_finite;    // the kernel stores here whether an operand has an infinity or NaN
      uint32_t found;         // what converting B has found, of the flags of planes; zero at first
      uint32_t out_of_range;  // elements of B that were, of the current tile; zero at first
      uint32_t absent;  // blocks of B that were zero, as those past its last row, of the current tile; zero at first
    } tensors;
    using PipelineStorage = typename MainloopPipeline::SharedStorage;
    PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;
  using PipelineStorage = typename SharedStorage::PipelineStorage;

  struct Arguments {
    Planes a;
    Planes b;
    ConvertedOperand converted_b;  // in place of b where B is converted
  };

  struct Params {
    using TmaA = decltype(cute::make_tma_copy_A_sm90(
        GmemTiledCopyA{},
        cute::make_tensor(static_cast<ElementA const*>(nullptr), cute::repeat_like(StrideA{}, int32_t(0)), StrideA{}),
        SmemLayoutA{}(cute::_, cute::_, cute::Int<0>{}), Tile{}, Cluster{}));
    using TmaB = decltype(cute::make_tma_copy_B_sm90(
        GmemTiledCopyB{},
        cute::make_tensor(static_cast<SourceB const*>(nullptr), cute::repeat_like(StrideB{}, int32_t(0)), StrideB{}),
        SourceLayoutB{}, Tile{}, Cluster{}));
    TmaA load_a;
    TmaB load_b;
    uint32_t tma_transaction_bytes;
    float const* scales_a;
    float const* scales_b;
    int scale_pitch_a;
    int scale_pitch_b;
    uint32_t* flags_b;  // null where nobody reads them
    int flag_count_b;
  };

  static constexpr uint32_t kBytesPerStage = kPlanes * kTileM * kSplitBlock * sizeof(ElementA) +
                                             kSourcesB * kTileN * kSplitBlock * sizeof(SourceB) +
                                             (kTileM + (converts_b ? 0 : kTileN)) * sizeof(float);

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments, void*) {
    auto const [m, n, k, l] = cute::append<4>(shape, 1);
    auto const planes_of = [k = k](Planes const& planes, int rows) {
      return cute::make_tensor(static_cast<ElementA const*>(planes.values),
                               cute::make_layout(cute::make_shape(rows, k, int{kPlanes}),
                                                 StrideA{k, cute::_1{}, static_cast<int64_t>(rows) * k}));
    };
    auto const b = [&, n = n] {
      if constexpr (converts_b) {
        ConvertedOperand const& operand = arguments.converted_b;
        return cute::make_tensor(operand.data,
                                 cute::make_layout(cute::make_shape(n, static_cast<int>(operand.columns), 1),
                                                   StrideB{operand.pitch, cute::_1{}, 0}));
      } else {
        return planes_of(arguments.b, n);
      }
    }();
    auto const rounded = [](int rows) { return (rows + kScaleAlignment - 1) / kScaleAlignment * kScaleAlignment; };
    return {cute::make_tma_copy_A_sm90(GmemTiledCopyA{}, planes_of(arguments.a, m),
                                       SmemLayoutA{}(cute::_, cute::_, cute::Int<0>{}), Tile{}, Cluster{}),
            cute::make_tma_copy_B_sm90(GmemTiledCopyB{}, b, SourceLayoutB{}, Tile{}, Cluster{}),
            kBytesPerStage,
            arguments.a.scales,
            arguments.b.scales,
            rounded(m),
            rounded(n),
            arguments.converted_b.flags,
            arguments.converted_b.flag_count};
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const& shape, Arguments const&) {
    return cute::get<2>(shape) % kSplitBlock == 0;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(params.load_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.load_b.get_tma_descriptor());
  }

  // (tile M, tile K, m, k, plane) and (tile N, tile K, n, k, plane)
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& shape, Params const& params) const {
    using cute::_;
    auto const [m, n, k, l] = shape;
    auto const a = params.load_a.get_tma_tensor(cute::make_shape(m, k, int{kPlanes}));
    auto const b = params.load_b.get_tma_tensor(cute::make_shape(n, k, int{kSourcesB}));
    return cute::make_tuple(
        cute::local_tile(a, Tile{}, cute::make_coord(_, _, _), cute::Step<cute::_1, cute::Underscore, cute::_1>{}),
        cute::local_tile(b, Tile{}, cute::make_coord(_, _, _), cute::Step<cute::Underscore, cute::_1, cute::_1>{}));
  }

  CUTLASS_DEVICE static uint32_t this_block() { return blockIdx.x + gridDim.x * blockIdx.y; }

  // Before a block's first tile, or instead of it. What is in B is then not known: another plan has to expect anything.
  CUTLASS_DEVICE static void initialize_flags(Params const& params, bool runs) {
    if (!converts_b || params.flags_b == nullptr) return;
    uint32_t const blocks = gridDim.x * gridDim.y;
    if (threadIdx.x == 0) params.flags_b[this_block()] = runs ? 0 : kNotFinite;
    if (this_block() > 0) return;
    for (uint32_t i = blocks + threadIdx.x; i < params.flag_count_b; i += blockDim.x) params.flags_b[i] = 0;
  }

  // Steps of K that the pipeline takes for a tile: the products, and where an operand is not finite a second pass over
  // the high planes. CUTLASS advances its pipeline state by the products' steps alone, so the second pass is rounded up
  // to a number of steps that leaves the state where it was; steps past the end read zeros.
  CUTLASS_DEVICE static int steps_of_second_pass(TensorStorage const& storage, int steps) {
    if (plan != SplitPlan::kSplit6 || storage.not_finite == 0) return 0;
    constexpr int kPeriod = 2 * stages;
    return (steps + kPeriod - 1) / kPeriod * kPeriod;
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write,
                           cute::tuple<TensorA, TensorB> const& inputs, BlockCoord const& block, KTileIterator,
                           int steps, int, uint32_t block_rank_in_cluster, TensorStorage& storage) {
    using cute::_;
    if (!cute::elect_one_sync()) return;
    auto const a_tile = cute::make_tensor(cute::make_smem_ptr(storage.a.data()), SmemLayoutA{});
    constexpr uint32_t kClusterM = decltype(cute::size<0>(Cluster{}))::value;
    constexpr uint32_t kClusterN = decltype(cute::size<1>(Cluster{}))::value;
    uint32_t const rank_m = block_rank_in_cluster % kClusterM;
    uint32_t const rank_n = block_rank_in_cluster / kClusterM;
    auto const [m, n, k, l] = block;
    auto const copy_a = params.load_a.get_slice(rank_n);
    auto const copy_b = params.load_b.get_slice(rank_m);
    auto const from_a = copy_a.partition_S(cute::get<0>(inputs)(_, _, m, _, _));  // (copy, M, K, k, plane)
    auto const from_b = copy_b.partition_S(cute::get<1>(inputs)(_, _, n, _, _));
    auto const to_a = copy_a.partition_D(a_tile);  // (copy, M, K, stage and plane)
    auto const to_b = [&](int stage, int source) {
      auto* const step = reinterpret_cast<SourceB*>(storage.b.data() + stage * kStepB);
      auto const tile = cute::make_tensor(cute::make_smem_ptr(step + source * kTileN * kSplitBlock), SourceLayoutB{});
      return copy_b.partition_D(tile);
    };

    uint16_t mask_a = 0;
    uint16_t mask_b = 0;
    auto const blocks = cute::Layout<Cluster>{};
    if constexpr (kClusterN > 1) {
      for (uint32_t other = 0; other < kClusterN; ++other) mask_a |= uint16_t(1) << blocks(rank_m, other, cute::_0{});
    }
    if constexpr (kClusterM > 1) {
      for (uint32_t other = 0; other < kClusterM; ++other) mask_b |= uint16_t(1) << blocks(other, rank_n, cute::_0{});
    }

    // A cluster may hold tiles past the last row: they multiply zeros, whatever their scales.
    float const* scales_a = params.scales_a + cute::min(int(m) * kTileM, params.scale_pitch_a - kTileM);
    float const* scales_b = params.scales_b + cute::min(int(n) * kTileN, params.scale_pitch_b - kTileN);
    int const all_steps = steps + steps_of_second_pass(storage, steps);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < all_steps; ++step) {
      pipeline.producer_acquire(write);
      auto* const barrier = pipeline.producer_get_barrier(write);
      int const stage = write.index();
      int const source = step < steps ? step : step - steps;
      CUTLASS_PRAGMA_UNROLL
      for (int plane = 0; plane < kPlanes; ++plane) {
        cute::copy(params.load_a.with(*barrier, mask_a), from_a(_, _, _, source, plane),
                   to_a(_, _, _, stage * kPlanes + plane));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int plane = 0; plane < kSourcesB; ++plane) {
        cute::copy(params.load_b.with(*barrier, mask_b), from_b(_, _, _, source, plane), to_b(stage, plane));
      }
      int64_t const block_of_k = cute::min(source, steps - 1);
      auto* const mbarrier = reinterpret_cast<uint64_t*>(barrier);
      cute::SM90_BULK_COPY_G2S::copy(scales_a + block_of_k * params.scale_pitch_a, mbarrier, storage.scales_a[stage],
                                     sizeof(storage.scales_a[stage]));
      if constexpr (!converts_b) {
        cute::SM90_BULK_COPY_G2S::copy(scales_b + block_of_k * params.scale_pitch_b, mbarrier, storage.scales_b[stage],
                                       sizeof(storage.scales_b[stage]));
      }
      ++write;
    }
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState write) {
    if (cute::elect_one_sync()) pipeline.producer_tail(write);
  }

  // One plane of each operand, multiplied.
  struct PlaneProduct {
    int plane_a;
    int plane_b;
  };

  template <class Accumulator>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulator& total, int steps, int thread,
                          TensorStorage& storage, Params const& params) {
    constexpr int kThreads = cutlass::NumThreadsPerWarpGroup;
    auto const a_tile = cute::make_tensor(cute::make_smem_ptr(storage.a.data()), SmemLayoutA{});
    auto const b_tile = cute::make_tensor(cute::make_smem_ptr(storage.b.data()), SmemLayoutB{});
    int const warp_group = __shfl_sync(0xffffffff, thread / kThreads, 0);
    TiledMma tiled_mma;
    auto const slice = tiled_mma.get_slice(warp_group * kThreads);
    auto const a = slice.make_fragment_A(slice.partition_A(a_tile));  // (instruction, M, K, stage and plane)
    auto const b = slice.make_fragment_B(slice.partition_B(b_tile));

    int const row = thread / 32 * 16 + thread % 32 / 4;  // of the first of this thread's elements
    int const column = thread % 4 * 2;
    Accumulator sum = cute::make_fragment_like(total);
    cute::clear(total);
    begin_step(pipeline, read, storage, thread, true);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      int const stage = read.index();
      PipelineState next = read;
      ++next;
      bool const has_next = step + 1 < steps;
      issue_small(tiled_mma, a, b, stage * kPlanes, sum);
      Step converted;
      if constexpr (converts_b) converted = fetch_step(pipeline, next, storage, thread, has_next);
      // What the copy engine wrote is read before the last products are issued: in a cluster one warp releases the
      // stage for its whole warpgroup, and that these products are done is all that it knows of the other warps.
      TileScales<kTileN> scales;
      scales.read_rows(storage.scales_a[stage] + row);
      if constexpr (!converts_b) scales.read_columns(storage.scales_b[stage] + column);
      finish_small(sum);
      issue(tiled_mma, a, b, stage * kPlanes, {0, 0}, sum);
      cutlass::warpgroup_commit_batch();
      if constexpr (converts_b) {
        store_step(converted, next, storage, thread, has_next);
        scales.read_columns(storage.scales_b[stage] + column);
      } else {
        fetch_step(pipeline, next, storage, thread, has_next);
      }
      cutlass::warpgroup_wait<0>();
      cutlass::warpgroup_fence_operand(sum);
      pipeline.consumer_release(read);
      scales.promote(sum, total);
      end_step(has_next);
      read = next;
    }
    take_not_finite(pipeline, read, tiled_mma, a, b, steps_of_second_pass(storage, steps), sum, total);
    if constexpr (converts_b) store_flags(storage, thread, steps, params.flags_b);
  }

  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}

 private:
  // Issues one product of planes over the step, from `first` on: the planes of the stage.
  template <class A, class B, class Accumulator>
  CUTLASS_DEVICE static void issue(TiledMma& tiled_mma, A const& a, B const& b, int first, PlaneProduct product,
                                   Accumulator& sum) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < decltype(cute::size<2>(a))::value; ++k) {
      cute::gemm(tiled_mma, a(cute::_, cute::_, k, first + product.plane_a),
                 b(cute::_, cute::_, k, first + product.plane_b), sum);
      tiled_mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
  }

  // All products of the plan over a step but high by high, the smallest first: what the tensor core truncates is
  // relative to the sum so far.
  template <class A, class B, class Accumulator>
  CUTLASS_DEVICE static void issue_small(TiledMma& tiled_mma, A const& a, B const& b, int first, Accumulator& sum) {
    tiled_mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    cutlass::warpgroup_fence_operand(sum);
    cutlass::warpgroup_arrive();
    if constexpr (plan == SplitPlan::kSplit6) {
      issue(tiled_mma, a, b, first, {0, 2}, sum);
      issue(tiled_mma, a, b, first, {2, 0}, sum);
      issue(tiled_mma, a, b, first, {1, 1}, sum);
    }
    issue(tiled_mma, a, b, first, {0, 1}, sum);
    issue(tiled_mma, a, b, first, {1, 0}, sum);
    cutlass::warpgroup_commit_batch();
  }

  // Takes split3's low scale out, so that high by high adds to the same accumulators.
  template <class Accumulator>
  CUTLASS_DEVICE static void finish_small(Accumulator& sum) {
    if constexpr (plan == SplitPlan::kSplit3) {
      cutlass::warpgroup_wait<0>();
      cutlass::warpgroup_fence_operand(sum);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < decltype(cute::size(sum))::value; ++i) sum(i) *= 1.0f / kLowScale;
      cutlass::warpgroup_fence_operand(sum);
    }
    cutlass::warpgroup_arrive();
  }

  // A converted step goes through registers: every thread has read its share of the fp32 values before any plane is
  // written over them, and all planes are written before the tensor cores read one.
  using Step = ConvertedStep<plan, kTileN>;
  static constexpr int kConverters = 2 * cutlass::NumThreadsPerWarpGroup;

  CUTLASS_DEVICE static void synchronize_consumers() {
    constexpr uint32_t kBarrier = 0;
    cutlass::arch::NamedBarrier::sync(kConverters, kBarrier);
  }

  CUTLASS_DEVICE static Step fetch_step(MainloopPipeline& pipeline, PipelineState const& state, TensorStorage& storage,
                                        int thread, bool exists) {
    if (!exists) return {};
    pipeline.consumer_wait(state, pipeline.consumer_try_wait(state));
    if constexpr (!converts_b) {
      return {};
    } else {
      return Step(reinterpret_cast<char const*>(storage.b.data() + state.index() * kStepB), thread);
    }
  }

  CUTLASS_DEVICE static void store_step(Step const& step, PipelineState const& state, TensorStorage& storage,
                                        int thread, bool exists) {
    if constexpr (converts_b) {
      if (!exists) return;
      synchronize_consumers();
      step.store(reinterpret_cast<char*>(storage.b.data() + state.index() * kStepB), storage.scales_b[state.index()],
                 thread);
      if (step.found != 0) atomicOr(&storage.found, step.found);
      if (step.absent != 0 && thread % Step::kLanesPerRow == 0) atomicAdd(&storage.absent, step.absent);
      if (step.out_of_range != 0 && thread % Step::kLanesPerRow == 0) {
        atomicAdd(&storage.out_of_range, step.out_of_range);
      }
      cutlass::arch::fence_view_async_shared();
    }
  }

  CUTLASS_DEVICE static void end_step(bool has_next) {
    if constexpr (converts_b) {
      if (has_next) synchronize_consumers();
    }
  }

  CUTLASS_DEVICE static void begin_step(MainloopPipeline& pipeline, PipelineState const& state, TensorStorage& storage,
                                        int thread, bool exists) {
    store_step(fetch_step(pipeline, state, storage, thread, exists), state, storage, thread, exists);
    end_step(exists);
  }

  CUTLASS_DEVICE static void store_flags(TensorStorage& storage, int thread, int steps, uint32_t* flags) {
    synchronize_consumers();
    if (thread != 0) return;
    int64_t const elements = (int64_t{steps} * kTileN - storage.absent) * kSplitBlock;
    if (storage.out_of_range * int64_t{split_math::kRareFraction} > elements) storage.found |= kOutOfRange;
    storage.out_of_range = 0;
    storage.absent = 0;
    if (flags == nullptr) return;
    flags[this_block()] = storage.found;
  }

  // The products of the parts of an infinity are NaN, its parts being infinity and zeros. The high planes alone,
  // without scales, give what fp32 gives wherever that is not finite.
  template <class A, class B, class Accumulator>
  CUTLASS_DEVICE static void take_not_finite(MainloopPipeline& pipeline, PipelineState read, TiledMma& tiled_mma,
                                             A const& a, B const& b, int steps, Accumulator& sum, Accumulator& total) {
    if (steps == 0) return;
    tiled_mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
      cutlass::warpgroup_fence_operand(sum);
      cutlass::warpgroup_arrive();
      issue(tiled_mma, a, b, read.index() * kPlanes, {0, 0}, sum);
      cutlass::warpgroup_commit_batch();
      cutlass::warpgroup_wait<0>();
      cutlass::warpgroup_fence_operand(sum);
      pipeline.consumer_release(read);
      ++read;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < decltype(cute::size(sum))::value; ++i) {
      if (!(::fabsf(sum(i)) <= 3.402823466e38f)) total(i) = sum(i);
    }
  }
};

}  // namespace sm90
}  // namespace cutfuse
