// A warp-specialised main loop over planes of 16-bit parts (see split/planes.h). A step of K loads every plane of both
// operands once and issues all products of the plan from shared memory. The tensor core truncates where it accumulates,
// so after each step the sum is scaled and added to the fp32 accumulators in registers, rounded to nearest: the
// promotion of DeepSeek-V3's fp8 products, with a scale for each row and block.
//
// B comes as planes, or as fp32: then a warpgroup of its own splits each step in shared memory, in place, between the
// copy engine and the tensor cores. A and B have a ring of buffers each, because B comes from further away.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "gemm/sm90_consumer_turns.h"
#include "gemm/sm90_convert_step.h"
#include "gemm/sm90_named_barriers.h"
#include "gemm/sm90_plane_products.h"
#include "gemm/sm90_tile_order.h"
#include "gemm/sm90_tile_scales.h"
#include "split/planes.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

template <SplitPlan plan, bool converts_b, class Tile, int buffers_a, int buffers_b>
struct SplitMainloop {
  using Products = PlaneProducts<plan, Tile>;
  using TileShape = Tile;
  using TiledMma = typename Products::TiledMma;
  using Element = typename Products::Element;
  static constexpr int kPlanes = Products::kPlanes;
  static constexpr bool kConvertsB = converts_b;
  static constexpr int kTileM = decltype(cute::size<0>(Tile{}))::value;
  static constexpr int kTileN = decltype(cute::size<1>(Tile{}))::value;
  static_assert(decltype(cute::size<2>(Tile{}))::value == kSplitBlock, "a step of K is a block of one scale");
  static_assert(kTileM == kScaleAlignment && kTileN == kScaleAlignment, "scales are copied for whole tiles");
  // Infinities and NaN get parts whose products are not what fp32 gives: split3's guard sends them to split6.
  static constexpr bool kTakesNotFinite = plan == SplitPlan::kSplit6;

  using LayoutA = typename Products::template LayoutA<buffers_a * kPlanes>;
  using LayoutB = typename Products::template LayoutB<buffers_b * kPlanes>;
  // A step of B as it is copied: planes, or fp32 where the planes will be.
  using SourceB = cute::conditional_t<converts_b, float, Element>;
  using SourceLayoutB = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<SourceB>{},
                                                     cute::make_shape(cute::Int<kTileN>{}, cute::Int<kSplitBlock>{})));
  static constexpr int kSourcesB = converts_b ? 1 : kPlanes;
  static constexpr int kPlaneB = kTileN * kSplitBlock;  // elements
  using Converter = StepConverter<plan, kTileN>;
  // The converters are what the consumers wait for where B is converted, and turns make that 3% slower.
  using Turns = ConsumerTurns<!converts_b>;

  using PositionA = cutlass::PipelineState<buffers_a>;
  using PositionB = cutlass::PipelineState<buffers_b>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using Barrier = cutlass::arch::ClusterBarrier;
  static constexpr int kConverterGroups = converts_b ? 1 : 0;
  static constexpr int kConsumers = 2 * cutlass::NumThreadsPerWarpGroup;

  struct SharedStorage {
    alignas(1024) cute::array_aligned<Element, cute::cosize_v<LayoutA>> a;  // swizzles repeat every 1024 bytes
    alignas(1024) cute::array_aligned<Element, cute::cosize_v<LayoutB>> b;
    // Twice as many as buffers, used by turns: a thread's own read of scales may still be under way when it releases
    // the step's buffers, and beside wgmma it can wait for longer than the next copy takes.
    alignas(128) float scales_a[2][buffers_a][kTileM];
    alignas(128) float scales_b[2][buffers_b][kTileN];
    FullBarrier full_a[buffers_a];
    FullBarrier full_b[buffers_b];
    Barrier converted_b[buffers_b];
    Barrier free_a[buffers_a];
    Barrier free_b[buffers_b];
    Barrier decided;    // once a tile: whether it takes a second pass
    uint32_t again[2];  // by turns
    RangeFindings range_b;
  };

  struct Arguments {
    Planes a;
    Planes b;
    ConvertedOperand converted_b;  // in place of b where B is converted
  };

  struct Params {
    using StrideA = cute::Stride<int64_t, cute::_1, int64_t>;
    using TmaA = decltype(cute::make_tma_copy_A_sm90(
        typename Products::CopyA{},
        cute::make_tensor(static_cast<Element const*>(nullptr), cute::repeat_like(StrideA{}, int32_t(0)), StrideA{}),
        LayoutA{}(cute::_, cute::_, cute::Int<0>{}), Tile{}, cute::Shape<cute::_1, cute::_1, cute::_1>{}));
    using TmaB = decltype(cute::make_tma_copy_B_sm90(
        typename Products::CopyB{},
        cute::make_tensor(static_cast<SourceB const*>(nullptr), cute::repeat_like(StrideA{}, int32_t(0)), StrideA{}),
        SourceLayoutB{}, Tile{}, cute::Shape<cute::_1, cute::_1, cute::_1>{}));
    TmaA load_a;
    TmaB load_b;
    float const* scales_a;
    float const* scales_b;
    int m;
    int n;
    cute::Shape<int, int, int> copied_a;  // as the copy engine takes them
    cute::Shape<int, int, int> copied_b;
    uint32_t* flags_b;  // null where nobody reads them
    int flag_count_b;
  };

  static constexpr uint32_t kBytesA = kPlanes * kTileM * kSplitBlock * sizeof(Element) + kTileM * sizeof(float);
  static constexpr uint32_t kBytesB = kSourcesB * kPlaneB * sizeof(SourceB) + (converts_b ? 0 : kTileN * sizeof(float));

  static Params make_params(int m, int n, int k, Arguments const& arguments) {
    using cute::_1;
    using Stride = typename Params::StrideA;
    // (rows, K within a step, step and plane)
    auto const planes_of = [k](Planes const& planes, int rows) {
      int const slabs = k / kSplitBlock * kPlanes;
      return cute::make_tensor(static_cast<Element const*>(planes.values),
                               cute::make_layout(cute::make_shape(rows, int{kSplitBlock}, slabs),
                                                 Stride{kSplitBlock, _1{}, static_cast<int64_t>(rows) * kSplitBlock}));
    };
    auto const a = planes_of(arguments.a, m);
    auto const b = [&] {
      if constexpr (converts_b) {
        ConvertedOperand const& operand = arguments.converted_b;
        int const columns = static_cast<int>(operand.columns);
        return cute::make_tensor(operand.data,
                                 cute::make_layout(cute::make_shape(n, columns, 1), Stride{operand.pitch, _1{}, 0}));
      } else {
        return planes_of(arguments.b, n);
      }
    }();
    constexpr cute::Shape<_1, _1, _1> kNoCluster{};
    return {cute::make_tma_copy_A_sm90(typename Products::CopyA{}, a, LayoutA{}(cute::_, cute::_, cute::Int<0>{}),
                                       Tile{}, kNoCluster),
            cute::make_tma_copy_B_sm90(typename Products::CopyB{}, b, SourceLayoutB{}, Tile{}, kNoCluster),
            arguments.a.scales,
            arguments.b.scales,
            m,
            n,
            cute::shape(a.layout()),
            cute::shape(b.layout()),
            arguments.converted_b.flags,
            arguments.converted_b.flag_count};
  }

  // By one thread, before any other uses the storage.
  CUTLASS_DEVICE static void initialize(SharedStorage& storage, Params const& params) {
    cute::prefetch_tma_descriptor(params.load_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.load_b.get_tma_descriptor());
    for (int i = 0; i < buffers_a; ++i) {
      storage.full_a[i].init(1);
      storage.free_a[i].init(kConsumers);
    }
    for (int i = 0; i < buffers_b; ++i) {
      storage.full_b[i].init(1);
      storage.converted_b[i].init(Converter::kThreads);
      storage.free_b[i].init(kConsumers);
    }
    storage.decided.init(1);
    storage.again[0] = storage.again[1] = 0;
    storage.range_b = {};
    cutlass::arch::fence_barrier_init();
  }

  // A role's place in its rings and in the tiles, kept from tile to tile.
  struct Progress {
    PositionA a;
    PositionB b;
    uint32_t tile = 0;
  };
  CUTLASS_DEVICE static Progress producer_start() { return {{0, 1, 0}, {0, 1, 0}, 0}; }

  // Copies A's planes of the tile's steps; one thread of the block does.
  CUTLASS_DEVICE static void load_a(Params const& params, SharedStorage& storage, int tile_m, StepRange steps,
                                    Progress& progress) {
    using cute::_;
    auto const from = params.load_a.get_slice(0).partition_S(
        cute::local_tile(params.load_a.get_tma_tensor(params.copied_a), Tile{}, cute::make_coord(tile_m, _, 0),
                         cute::Step<cute::_1, cute::Underscore, cute::_1>{}));  // (.., step and plane)
    auto const to = params.load_a.get_slice(0).partition_D(
        cute::make_tensor(cute::make_smem_ptr(storage.a.data()), LayoutA{}));  // (.., buffer and plane)
    int const pitch = (params.m + kScaleAlignment - 1) / kScaleAlignment * kScaleAlignment;
    float const* const scales = params.scales_a + tile_m * kTileM;
    for_each_pass(storage, progress, [&] {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = steps.first; step < steps.first + steps.count; ++step, ++progress.a) {
        int const buffer = progress.a.index();
        storage.free_a[buffer].wait(progress.a.phase());
        auto* const full = reinterpret_cast<uint64_t*>(&storage.full_a[buffer]);
        storage.full_a[buffer].arrive_and_expect_tx(kBytesA);
        CUTLASS_PRAGMA_UNROLL
        for (int plane = 0; plane < kPlanes; ++plane) {
          cute::copy(params.load_a.with(*full), from(_, _, _, step * kPlanes + plane),
                     to(_, _, _, buffer * kPlanes + plane));
        }
        auto& to_scales = storage.scales_a[progress.a.phase() ^ 1][buffer];  // producers are a phase ahead
        cute::SM90_BULK_COPY_G2S::copy(scales + static_cast<int64_t>(step) * pitch, full, to_scales, sizeof(to_scales));
      }
    });
  }

  // Copies B's planes, or its fp32 values where the planes will be; one thread of the block does.
  CUTLASS_DEVICE static void load_b(Params const& params, SharedStorage& storage, int tile_n, StepRange steps,
                                    Progress& progress) {
    using cute::_;
    auto const copy = params.load_b.get_slice(0);
    auto const from = copy.partition_S(cute::local_tile(params.load_b.get_tma_tensor(params.copied_b), Tile{},
                                                        cute::make_coord(_, tile_n, _),
                                                        cute::Step<cute::Underscore, cute::_1, cute::_1>{}));
    int const pitch = (params.n + kScaleAlignment - 1) / kScaleAlignment * kScaleAlignment;
    for_each_pass(storage, progress, [&] {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = steps.first; step < steps.first + steps.count; ++step, ++progress.b) {
        int const buffer = progress.b.index();
        storage.free_b[buffer].wait(progress.b.phase());
        auto* const full = reinterpret_cast<uint64_t*>(&storage.full_b[buffer]);
        storage.full_b[buffer].arrive_and_expect_tx(kBytesB);
        CUTLASS_PRAGMA_UNROLL
        for (int source = 0; source < kSourcesB; ++source) {
          auto* const to = reinterpret_cast<SourceB*>(buffer_b(storage, buffer)) + source * kPlaneB;
          int const slab = converts_b ? 0 : step * kPlanes + source;
          cute::copy(params.load_b.with(*full), from(_, _, _, converts_b ? step : 0, slab),
                     copy.partition_D(cute::make_tensor(cute::make_smem_ptr(to), SourceLayoutB{})));
        }
        if constexpr (!converts_b) {
          auto& to_scales = storage.scales_b[progress.b.phase() ^ 1][buffer];
          cute::SM90_BULK_COPY_G2S::copy(params.scales_b + static_cast<int64_t>(step) * pitch + tile_n * kTileN, full,
                                         to_scales, sizeof(to_scales));
        }
      }
    });
  }

  // Splits B's steps as they arrive; a warpgroup does, thread counts in it.
  CUTLASS_DEVICE static void convert_b(SharedStorage& storage, StepRange steps, int thread, Progress& progress) {
    RangeCounts counts;
    for_each_pass(storage, progress, [&] {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < steps.count; ++step, ++progress.b) {
        int const buffer = progress.b.index();
        storage.full_b[buffer].wait(progress.b.phase());
        Converter::convert(reinterpret_cast<char*>(storage.b.data()), buffer * kPlanes * kPlaneB * sizeof(Element),
                           storage.scales_b[progress.b.phase()][buffer], thread, counts);
        cutlass::arch::fence_view_async_shared();
        storage.converted_b[buffer].arrive();
      }
    });
    if constexpr (plan == SplitPlan::kSplit3) storage.range_b.note(counts, steps.count * kTileN, thread);
  }

  // Leaves in total the tile's product over its steps; two warpgroups do.
  template <class Accumulator>
  CUTLASS_DEVICE static void multiply(SharedStorage& storage, StepRange steps, int thread, Accumulator& total,
                                      Progress& progress) {
    Accumulator sum = cute::make_fragment_like(total);
    cute::clear(total);
    TiledMma mma;
    auto const slice = mma.get_slice(Turns::warp_group_of(thread) * cutlass::NumThreadsPerWarpGroup);
    auto const a_tile = cute::make_tensor(cute::make_smem_ptr(storage.a.data()), LayoutA{});
    auto const b_tile = cute::make_tensor(cute::make_smem_ptr(storage.b.data()), LayoutB{});
    auto const a = slice.make_fragment_A(slice.partition_A(a_tile));
    auto const b = slice.make_fragment_B(slice.partition_B(b_tile));
    auto const planes = [&] {
      return typename Products::template Step<decltype(a), decltype(b)>{a, b, int(progress.a.index()) * kPlanes,
                                                                        int(progress.b.index()) * kPlanes};
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < steps.count; ++step) {
      wait_for_step(storage, progress);
      multiply_step(storage, thread, mma, planes(), sum, total, progress);
    }
    if constexpr (kTakesNotFinite) {
      if (!decide(storage, thread, total, progress.tile++ & 1)) return;
      mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < steps.count; ++step) {
        wait_for_step(storage, progress);
        Products::add_high(mma, planes(), sum);
        release_step(storage, progress);
      }
      take_not_finite(sum, total);
    }
  }

  // Before a block's first tile, or instead of it.
  CUTLASS_DEVICE static void initialize_flags(Params const& params) {
    if (!converts_b || params.flags_b == nullptr) return;
    if (threadIdx.x == 0) params.flags_b[blockIdx.x] = 0;
    if (blockIdx.x > 0) return;
    for (int i = static_cast<int>(gridDim.x + threadIdx.x); i < params.flag_count_b; i += blockDim.x) {
      params.flags_b[i] = 0;
    }
  }

  // After a block's last tile, by the threads that convert.
  CUTLASS_DEVICE static void store_flags(Params const& params, SharedStorage const& storage, int thread) {
    if constexpr (plan == SplitPlan::kSplit3) {
      if (thread == 0 && params.flags_b != nullptr) params.flags_b[blockIdx.x] = storage.range_b.flags;
    }
  }

  CUTLASS_DEVICE static void synchronize_consumers() {
    cutlass::arch::NamedBarrier::sync(kConsumers, kConsumersBarrier);
  }

 private:
  CUTLASS_DEVICE static Element* buffer_b(SharedStorage& storage, int buffer) {
    return storage.b.data() + buffer * kPlanes * kPlaneB;
  }

  // A role's steps, once, and again where the tile's consumers say so.
  template <class Pass>
  CUTLASS_DEVICE static void for_each_pass(SharedStorage& storage, Progress& progress, Pass const& pass) {
    uint32_t const turn = progress.tile++ & 1;
    bool is_first = true;
    bool again = true;
    CUTLASS_PRAGMA_NO_UNROLL
    while (again) {  // the pass's code is there once
      pass();
      again = false;
      if constexpr (kTakesNotFinite) {
        if (is_first) storage.decided.wait(turn);
        again = is_first && *static_cast<uint32_t volatile*>(&storage.again[turn]) != 0;
        is_first = false;
      }
    }
  }

  CUTLASS_DEVICE static void wait_for_step(SharedStorage& storage, Progress const& progress) {
    storage.full_a[progress.a.index()].wait(progress.a.phase());
    if constexpr (converts_b) {
      storage.converted_b[progress.b.index()].wait(progress.b.phase());
    } else {
      storage.full_b[progress.b.index()].wait(progress.b.phase());
    }
  }

  // Every thread says it for itself; one of each warp would be no faster.
  CUTLASS_DEVICE static void release_step(SharedStorage& storage, Progress& progress) {
    storage.free_a[progress.a.index()].arrive();
    storage.free_b[progress.b.index()].arrive();
    ++progress.a;
    ++progress.b;
  }

  template <class Planes, class Accumulator>
  CUTLASS_DEVICE static void multiply_step(SharedStorage& storage, int thread, TiledMma& mma, Planes const& planes,
                                           Accumulator& sum, Accumulator& total, Progress& progress) {
    Turns::take(thread);
    Products::issue_all(mma, planes, sum);
    Turns::pass(thread);
    Products::finish(sum);
    TileScales<kTileN> scales;  // this thread's elements begin at this row and column of the tile
    scales.read_rows(storage.scales_a[progress.a.phase()][progress.a.index()] + thread / 32 * 16 + thread % 32 / 4);
    scales.read_columns(storage.scales_b[progress.b.phase()][progress.b.index()] + thread % 4 * 2);
    release_step(storage, progress);
    scales.promote(sum, total);
  }

  // The products of the parts of an infinity are NaN, its parts being infinity and zeros. Where the tile has a result
  // that is not finite, the high planes alone, without scales, give what fp32 gives there.
  template <class Accumulator>
  CUTLASS_DEVICE static void take_not_finite(Accumulator const& sum, Accumulator& total) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < decltype(cute::size(sum))::value; ++i) {
      if (!split_math::is_finite(split_math::magnitude_of(sum(i)))) total(i) = sum(i);
    }
  }

  // Whether the tile takes a second pass, for its producers too. They have all read what was decided of the tile before
  // when they have delivered this one.
  template <class Accumulator>
  CUTLASS_DEVICE static bool decide(SharedStorage& storage, int thread, Accumulator const& total, uint32_t turn) {
    uint32_t largest = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < decltype(cute::size(total))::value; ++i) {
      largest = cute::max(largest, split_math::magnitude_of(total(i)));
    }
    if (!split_math::is_finite(largest)) storage.again[turn] = 1;
    if (thread == 0) storage.again[turn ^ 1] = 0;
    synchronize_consumers();
    bool const again = *static_cast<uint32_t volatile*>(&storage.again[turn]) != 0;
    if (thread == 0) storage.decided.arrive();
    return again;
  }
};

}  // namespace sm90
}  // namespace cutfuse
