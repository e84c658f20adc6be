// A warp-specialised main loop over planes of 16-bit parts (see split/planes.h). A step is an iteration over 64 of K:
// it loads every plane of both operands once, and issues all products of the parts. The tensor core truncates where it
// accumulates, so after each step the sum is multiplied by the scales and added to fp32 accumulators in registers,
// which rounds to nearest. DeepSeek-V3 promotes its fp8 products in the same way.
//
// B is either planes or fp32. In the latter case each consumer warpgroup splits its rows of a step in registers, while
// the other's products run. A and B have separate rings of buffers: B's loads take longer and need more buffers.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <cutlass/pipeline/pipeline.hpp>

#include "gemm/sm90_converted_rows.h"
#include "gemm/sm90_plane_products.h"
#include "gemm/sm90_scheduling.h"
#include "split/planes.h"
#include "split/split_math.h"

namespace cutfuse {
namespace sm90 {

template <SplitScheme scheme, bool converts_b, class Tile, int buffers_a, int buffers_b>
struct SplitMainloop {
  using Products = PlaneProducts<scheme, Tile, converts_b>;
  using TileShape = Tile;
  using TiledMma = typename Products::TiledMma;
  using Element = typename Products::Element;
  static constexpr int kPlanes = Products::kPlanes;
  static constexpr int kTileM = decltype(cute::size<0>(Tile{}))::value;
  static constexpr int kTileN = decltype(cute::size<1>(Tile{}))::value;
  static_assert(decltype(cute::size<2>(Tile{}))::value == kSplitBlock, "a step of K is a block of one scale");
  static_assert(kTileM == kScaleAlignment && kTileN == kScaleAlignment, "scales are copied for whole tiles");
  // Whether infinities and NaN give what fp32 gives. In split3 they do not: its guard has split6 run for such operands.
  static constexpr bool kTakesNotFinite = scheme == SplitScheme::kSplit6;

  using LayoutA = typename Products::template LayoutA<buffers_a * kPlanes>;
  using LayoutB = typename Products::template LayoutB<buffers_b * kPlanes>;
  // A step of B as it is in shared memory.
  using SourceB = cute::conditional_t<converts_b, float, Element>;
  using SourceLayoutB = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<SourceB>{},
                                                     cute::make_shape(cute::Int<kTileN>{}, cute::Int<kSplitBlock>{})));
  static constexpr int kSourcesB = converts_b ? 1 : kPlanes;
  static constexpr int kSourceSizeB = kTileN * kSplitBlock;  // elements
  using Rows = ConvertedRows<scheme, kTileN>;
  static constexpr bool kSharesProducts = converts_b && scheme == SplitScheme::kSplit3;  // see WarpTileScales
  static constexpr int kScalesB = kTileN / scale_rows(scheme, true);                     // scales of B in a step

  using PositionA = cutlass::PipelineState<buffers_a>;
  using PositionB = cutlass::PipelineState<buffers_b>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using Barrier = cutlass::arch::ClusterBarrier;

  struct SharedStorage {
    alignas(1024) cute::array_aligned<Element, cute::cosize_v<LayoutA>> a;  // 1024 bytes: the swizzle's period
    alignas(1024) cute::array_aligned<SourceB, buffers_b * kSourcesB * kSourceSizeB> b;
    // Twice as many buffers as planes: a thread releases a step while its loads of scales may still be in flight.
    alignas(128) float scales_a[2][buffers_a][kTileM];
    alignas(128) float scales_b[2][converts_b ? 1 : buffers_b][kScalesB];
    alignas(128) typename WarpTileScales<kTileM>::Products products[kSharesProducts ? kConsumerThreads / 32 : 1];
    FullBarrier full_a[buffers_a];
    FullBarrier full_b[buffers_b];
    Barrier free_a[buffers_a];
    Barrier free_b[buffers_b];
    SecondPass<kTakesNotFinite> second_pass;
    RangeFindings range_b;
  };

  struct Arguments {
    Planes a;
    Planes b;
    ConvertedOperand converted_b;  // used instead of b if B is fp32
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
    cute::Shape<int, int, int> copied_a;  // the shape of the TMA's tensor: rows, columns, ...
    cute::Shape<int, int, int> copied_b;
    cute::TMA::CacheHintSm90 keeps_a;  // hint to the L2
    cute::TMA::CacheHintSm90 keeps_b;
    uint32_t* flags_b;  // null if they are not needed
    int flag_count_b;
  };

  static constexpr uint32_t kBytesA = kPlanes * kTileM * kSplitBlock * sizeof(Element) + kTileM * sizeof(float);
  static constexpr uint32_t kBytesB =
      kSourcesB * kSourceSizeB * sizeof(SourceB) + (converts_b ? 0 : kScalesB * sizeof(float));

  static Params make_params(int m, int n, int k, Arguments const& arguments) {
    using cute::_1;
    using Stride = typename Params::StrideA;
    // Modes: (rows, K within a step, step and plane).
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
    using CacheHint = cute::TMA::CacheHintSm90;
    bool const is_read_once = m <= kTileM;  // B may leave the L2 first: 5% faster for 128x4096x4096 (H200)
    return {cute::make_tma_copy_A_sm90(typename Products::CopyA{}, a, LayoutA{}(cute::_, cute::_, cute::Int<0>{}),
                                       Tile{}, kNoCluster),
            cute::make_tma_copy_B_sm90(typename Products::CopyB{}, b, SourceLayoutB{}, Tile{}, kNoCluster),
            arguments.a.scales,
            arguments.b.scales,
            cute::shape(a.layout()),
            cute::shape(b.layout()),
            is_read_once ? CacheHint::EVICT_LAST : CacheHint::EVICT_NORMAL,
            is_read_once ? CacheHint::EVICT_FIRST : CacheHint::EVICT_NORMAL,
            arguments.converted_b.flags,
            arguments.converted_b.flag_count};
  }

  // One thread calls it, before any other thread uses the storage.
  CUTLASS_DEVICE static void initialize(SharedStorage& storage, Params const& params) {
    cute::prefetch_tma_descriptor(params.load_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.load_b.get_tma_descriptor());
    for (int i = 0; i < buffers_a; ++i) {
      storage.full_a[i].init(1);
      storage.free_a[i].init(kConsumerThreads);
    }
    for (int i = 0; i < buffers_b; ++i) {
      storage.full_b[i].init(1);
      storage.free_b[i].init(kConsumerThreads);
    }
    storage.second_pass.initialize();
    storage.range_b = {};
    cutlass::arch::fence_barrier_init();
  }

  // Ring positions and tile count of one warp role, kept from tile to tile.
  struct Progress {
    PositionA a;
    PositionB b;
    uint32_t tile = 0;
  };
  CUTLASS_DEVICE static Progress producer_start() { return {{0, 1, 0}, {0, 1, 0}, 0}; }

  // Copies A's planes to shared memory, for all steps of a tile. One thread of the block calls it.
  CUTLASS_DEVICE static void load_a(Params const& params, SharedStorage& storage, int tile_m, StepRange steps,
                                    Progress& progress) {
    using cute::_;
    auto const from = params.load_a.get_slice(0).partition_S(
        cute::local_tile(params.load_a.get_tma_tensor(params.copied_a), Tile{}, cute::make_coord(tile_m, _, 0),
                         cute::Step<cute::_1, cute::Underscore, cute::_1>{}));  // modes: (.., step and plane)
    auto const to = params.load_a.get_slice(0).partition_D(
        cute::make_tensor(cute::make_smem_ptr(storage.a.data()), LayoutA{}));  // modes: (.., buffer and plane)
    int const pitch = (cute::get<0>(params.copied_a) + kScaleAlignment - 1) / kScaleAlignment * kScaleAlignment;
    float const* const scales = params.scales_a + tile_m * kTileM;
    storage.second_pass.for_each_pass(progress.tile++ & 1, [&] {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = steps.first; step < steps.first + steps.count; ++step, ++progress.a) {
        int const buffer = progress.a.index();
        storage.free_a[buffer].wait(progress.a.phase());
        auto* const full = reinterpret_cast<uint64_t*>(&storage.full_a[buffer]);
        storage.full_a[buffer].arrive_and_expect_tx(kBytesA);
        CUTLASS_PRAGMA_UNROLL
        for (int plane = 0; plane < kPlanes; ++plane) {
          cute::copy(params.load_a.with(*full, 0, params.keeps_a), from(_, _, _, step * kPlanes + plane),
                     to(_, _, _, buffer * kPlanes + plane));
        }
        auto& to_scales = storage.scales_a[progress.a.phase() ^ 1][buffer];  // the phase of a producer is one ahead
        cute::SM90_BULK_COPY_G2S::copy(scales + static_cast<int64_t>(step) * pitch, full, to_scales, sizeof(to_scales));
      }
    });
  }

  // Copies B's planes or fp32 values to shared memory. One thread of the block calls it.
  CUTLASS_DEVICE static void load_b(Params const& params, SharedStorage& storage, int tile_n, StepRange steps,
                                    Progress& progress) {
    using cute::_;
    auto const copy = params.load_b.get_slice(0);
    auto const from = copy.partition_S(cute::local_tile(params.load_b.get_tma_tensor(params.copied_b), Tile{},
                                                        cute::make_coord(_, tile_n, _),
                                                        cute::Step<cute::Underscore, cute::_1, cute::_1>{}));
    int const pitch = (cute::get<0>(params.copied_b) + kScaleAlignment - 1) / kScaleAlignment * kScalesB;
    storage.second_pass.for_each_pass(progress.tile++ & 1, [&] {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = steps.first; step < steps.first + steps.count; ++step, ++progress.b) {
        int const buffer = progress.b.index();
        storage.free_b[buffer].wait(progress.b.phase());
        auto* const full = reinterpret_cast<uint64_t*>(&storage.full_b[buffer]);
        storage.full_b[buffer].arrive_and_expect_tx(kBytesB);
        CUTLASS_PRAGMA_UNROLL
        for (int source = 0; source < kSourcesB; ++source) {
          auto* const to = buffer_b(storage, buffer) + source * kSourceSizeB;
          int const slab = converts_b ? 0 : step * kPlanes + source;
          cute::copy(params.load_b.with(*full, 0, params.keeps_b), from(_, _, _, converts_b ? step : 0, slab),
                     copy.partition_D(cute::make_tensor(cute::make_smem_ptr(to), SourceLayoutB{})));
        }
        if constexpr (!converts_b) {
          auto& to_scales = storage.scales_b[progress.b.phase() ^ 1][buffer];
          cute::SM90_BULK_COPY_G2S::copy(params.scales_b + static_cast<int64_t>(step) * pitch + tile_n * kScalesB, full,
                                         to_scales, sizeof(to_scales));
        }
      }
    });
  }

  // Computes the product of a tile over its steps, into `total`. Both consumer warpgroups call it.
  template <class Accumulator>
  CUTLASS_DEVICE static void multiply(SharedStorage& storage, StepRange steps, int thread, ConsumerTurns const& turns,
                                      Accumulator& total, Progress& progress) {
    Accumulator sum = cute::make_fragment_like(total);
    cute::clear(total);
    typename Products::Mma mma;
    Rows rows;
    int const last = steps.count - 1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step <= last; ++step) {
      take_step(storage, thread, rows, step == last, progress);
      turns.take();
      Products::issue_all(mma, planes_of_step(mma, storage, turns.warp_group, rows, progress), sum);
      turns.pass();
      promote_step(storage, thread, rows, step == last, sum, total, progress);
    }
    if constexpr (kTakesNotFinite) {
      if (storage.second_pass.decide(thread, total, progress.tile++ & 1)) {
        release_held(storage, progress);
        mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = 0; step <= last; ++step) {
          take_step(storage, thread, rows, step == last, progress);
          Products::add_high(mma, planes_of_step(mma, storage, turns.warp_group, rows, progress), sum);
          release_step(storage, step == last, progress);
        }
        storage.second_pass.take_not_finite(sum, total);
      }
    }
    if constexpr (converts_b) turn_over(storage, thread, total, progress);
    release_held(storage, progress);
  }

  // Clears this block's flag, and block 0 those past the grid. Every block calls it first, even one without a tile.
  CUTLASS_DEVICE static void initialize_flags(Params const& params) {
    if (!converts_b || params.flags_b == nullptr) return;
    if (threadIdx.x == 0) params.flags_b[blockIdx.x] = 0;
    if (blockIdx.x > 0) return;
    for (int i = static_cast<int>(gridDim.x + threadIdx.x); i < params.flag_count_b; i += blockDim.x) {
      params.flags_b[i] = 0;
    }
  }

  // How many elements of B the steps of a tile have.
  CUTLASS_DEVICE static int64_t elements_of(Params const& params, TileSlice const& work) {
    int const rows = cute::min(cute::get<0>(params.copied_b) - work.n * kTileN, int{kTileN});
    int const columns =
        cute::min(cute::get<1>(params.copied_b) - work.steps.first * kSplitBlock, work.steps.count * kSplitBlock);
    return int64_t{rows} * columns;
  }

  // The consumers call it after the block's last tile and turn. `elements`: how many elements of B the block has split.
  CUTLASS_DEVICE static void store_flags(Params const& params, SharedStorage const& storage, int thread,
                                         int64_t elements) {
    if constexpr (converts_b && scheme == SplitScheme::kSplit3) {
      if (thread == 0 && params.flags_b != nullptr) params.flags_b[blockIdx.x] = storage.range_b.flags_of(elements);
    }
  }

 private:
  CUTLASS_DEVICE static SourceB* buffer_b(SharedStorage& storage, int buffer) {
    return storage.b.data() + buffer * kSourcesB * kSourceSizeB;
  }

  // Waits for the next step of both operands. Splits B's if it is fp32.
  CUTLASS_DEVICE static void take_step(SharedStorage& storage, int thread, Rows& rows, bool is_last,
                                       Progress const& progress) {
    int const buffer = progress.b.index();
    storage.full_b[buffer].wait(progress.b.phase());
    if constexpr (converts_b) {
      rows.convert(reinterpret_cast<char const*>(storage.b.data()), buffer * kSourceSizeB * int{sizeof(SourceB)},
                   thread, storage.range_b);
      if (!is_last) storage.free_b[buffer].arrive();
    }
    storage.full_a[progress.a.index()].wait(progress.a.phase());
  }

  // The fragments of a step: A's planes are in shared memory, B's are there or in registers.
  CUTLASS_DEVICE static auto planes_of_step(typename Products::Mma const& mma, SharedStorage& storage, int warp_group,
                                            Rows const& rows, Progress const& progress) {
    auto const slice = mma.get_slice(warp_group * cutlass::NumThreadsPerWarpGroup);
    auto const a = cute::make_tensor(cute::make_smem_ptr(storage.a.data()), LayoutA{});
    int const first_a = static_cast<int>(progress.a.index()) * kPlanes;
    if constexpr (converts_b) {
      return Products::make_step(slice.make_fragment_B(slice.partition_B(a)), rows.parts, first_a, 0);
    } else {
      auto const b = cute::make_tensor(cute::make_smem_ptr(storage.b.data()), LayoutB{});
      return Products::make_step(slice.make_fragment_A(slice.partition_A(a)),
                                 slice.make_fragment_B(slice.partition_B(b)), first_a,
                                 static_cast<int>(progress.b.index()) * kPlanes);
    }
  }

  // Waits for `sum`, multiplies it by the scales and adds it to `total`. If B's parts are the first operand, rows of
  // the sum are B's and columns are A's. Scales are loaded while the tensor cores still compute the sum, as far as
  // there are registers for them.
  template <class Accumulator>
  CUTLASS_DEVICE static void promote_step(SharedStorage& storage, int thread, Rows const& rows, bool is_last,
                                          Accumulator& sum, Accumulator& total, Progress& progress) {
    float const* const scales_a = storage.scales_a[progress.a.phase()][progress.a.index()];
    int const row = thread / 32 * 16 + thread % 32 / 4;
    int const column = thread % 4 * 2;
    if constexpr (kSharesProducts) {
      auto& products = storage.products[thread / 32];
      WarpTileScales<kTileM>::put(rows.scales[0], scales_a, products, thread % 32);
      Products::finish(sum);
      release_step(storage, is_last, progress);
      WarpTileScales<kTileM>::promote(products, thread % 32, sum, total);
    } else if constexpr (scheme == SplitScheme::kSplit3) {
      SharedTileScales<kTileN> scales;
      scales.read(scales_a + row, storage.scales_b[progress.b.phase()][progress.b.index()]);
      Products::finish(sum);
      release_step(storage, is_last, progress);
      scales.promote(sum, total);
    } else {
      Products::finish(sum);
      TileScales<kTileN> scales;
      if constexpr (converts_b) {
        scales.rows[0] = rows.scales[0];
        scales.rows[1] = rows.scales[1];
        scales.read_columns(scales_a + column);
      } else {
        scales.read_rows(scales_a + row);
        scales.read_columns(storage.scales_b[progress.b.phase()][progress.b.index()] + column);
      }
      release_step(storage, is_last, progress);
      scales.promote(sum, total);
    }
  }

  // With fp32 B, keeps the last step's buffers: the transposition uses them, then release_held() frees them.
  CUTLASS_DEVICE static void release_step(SharedStorage& storage, bool is_last, Progress& progress) {
    if (converts_b && is_last) return;
    release(storage, !converts_b, progress);  // a step of fp32 B is released as soon as it is split
  }
  CUTLASS_DEVICE static void release_held(SharedStorage& storage, Progress& progress) {
    if constexpr (converts_b) release(storage, true, progress);
  }

  // Every thread arrives at the barrier. One arrival for each warp is no faster.
  CUTLASS_DEVICE static void release(SharedStorage& storage, bool of_both, Progress& progress) {
    storage.free_a[progress.a.index()].arrive();
    if (of_both) storage.free_b[progress.b.index()].arrive();
    ++progress.a;
    ++progress.b;
  }

  // Transposes a tile to the layout that the epilogue expects.
  template <class Accumulator>
  CUTLASS_DEVICE static void turn_over(SharedStorage& storage, int thread, Accumulator& total,
                                       Progress const& progress) {
    static_assert(kTileM == TileExchange::kSize && kTileN == TileExchange::kSize, "tiles that are turned over");
    static_assert(kPlanes * kTileM * kSplitBlock * sizeof(Element) >= TileExchange::kHalfFloats * sizeof(float) &&
                      kSourceSizeB >= TileExchange::kHalfFloats,
                  "each operand's buffer holds half a tile");
    TileExchange const exchange{
        {reinterpret_cast<float*>(storage.a.data() + progress.a.index() * kPlanes * kTileM * kSplitBlock),
         reinterpret_cast<float*>(buffer_b(storage, progress.b.index()))}};
    synchronize_consumers();  // no product reads the buffers any more
    exchange.put(thread, total);
    synchronize_consumers();
    exchange.get(thread, total);
    __threadfence_block();  // the reads are complete before the TMA overwrites the buffers
    cutlass::arch::fence_view_async_shared();
  }
};

}  // namespace sm90
}  // namespace cutfuse
