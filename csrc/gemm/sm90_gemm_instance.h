// One sm_90a GEMM kernel for each row of plan/gemm_configs.def: CUTLASS's warp-specialised TMA main loop, followed by
// the epilogue program. Only the generated translation units include this file; each instantiates some rows.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/cutlass.h>

#include <algorithm>
#include <cstdint>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include "common/launch.h"
#include "common/loaded_kernel.h"
#include "epilogue/sm90_program_visitor.h"
#include "gemm/dispatch.h"
#include "gemm/sm90_pingpong_kernel.h"
#include "gemm/sm90_split_kernel.h"
#include "plan/gemm_configs.h"

namespace cutfuse {
namespace sm90 {

template <DType dtype>
using ElementOf = cute::conditional_t<dtype == DType::kBFloat16, cutlass::bfloat16_t,
                                      cute::conditional_t<dtype == DType::kFloat16, cutlass::half_t, float>>;

struct Cooperative {
  static constexpr Schedule kSchedule = Schedule::kCooperative;
  static constexpr int kEpilogues = 1;  // that run at the same time, each with shared memory of its own
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};
struct Pingpong {
  static constexpr Schedule kSchedule = Schedule::kPingpong;
  static constexpr int kEpilogues = 2;
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
// The schedules of products over planes. The rings of A and B have buffers for this many iterations of K, as many as
// fit into shared memory beside one subtile of the result.
template <SplitScheme scheme, bool converts_b, int buffers_a, int buffers_b>
struct OverPlanes : Cooperative {
  template <class Tile>
  using SplitMainloop = sm90::SplitMainloop<scheme, converts_b, Tile, buffers_a, buffers_b>;
};
using Split3 = OverPlanes<SplitScheme::kSplit3, false, 3, 3>;
using Split6 = OverPlanes<SplitScheme::kSplit6, false, 2, 2>;
using Convert3 = OverPlanes<SplitScheme::kSplit3, true, 2, 4>;
using Convert6 = OverPlanes<SplitScheme::kSplit6, true, 2, 3>;

// How CUTLASS calls the layout of an operand [M or N, K], of which rows or columns are contiguous; and its strides. It
// takes the weight as a matrix [K, N].
template <bool by_columns>
struct OperandLayout {
  using AsX = cutlass::layout::RowMajor;
  using AsWeight = cutlass::layout::ColumnMajor;
  static auto strides(int64_t pitch) { return cute::make_stride(pitch, cute::_1{}, int64_t{0}); }
};
template <>
struct OperandLayout<true> {
  using AsX = cutlass::layout::ColumnMajor;
  using AsWeight = cutlass::layout::RowMajor;
  static auto strides(int64_t pitch) { return cute::make_stride(cute::_1{}, pitch, int64_t{0}); }
};

template <class Schedule>
constexpr bool kIsSplit = !std::is_same_v<Schedule, Cooperative> && !std::is_same_v<Schedule, Pingpong>;

// CUTLASS's epilogue with one subtile in shared memory for its stores instead of two: beside the buffers of the planes
// there is no room for a second.
template <class Epilogue>
struct WithOneStore;
template <int stages_c, int stages_d, int fragment, bool reuse, bool delay, class... Rest>
struct WithOneStore<cutlass::epilogue::collective::CollectiveEpilogue<
    cutlass::epilogue::Sm90TmaWarpSpecialized<stages_c, stages_d, fragment, reuse, delay>, Rest...>> {
  using type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90TmaWarpSpecialized<stages_c, 1, fragment, reuse, false>, Rest...>;
};

// CUTLASS's epilogue with so many subtiles of C on their way, in buffers that the stores then take over. CUTLASS's loop
// puts stores off by a subtile, as it does without a C.
template <class Element, class Schedule>
constexpr int kSourceStages = sizeof(Element) == 2 && Schedule::kEpilogues == 1 ? 4 : 3;
constexpr int kEnoughStages = 8;  // of a main loop, which one more would not make faster
template <class Epilogue, int stages>
struct WithSource;
template <int stages_c, int stages_d, int fragment, bool reuse, bool delay, class... Rest, int stages>
struct WithSource<cutlass::epilogue::collective::CollectiveEpilogue<
                      cutlass::epilogue::Sm90TmaWarpSpecialized<stages_c, stages_d, fragment, reuse, delay>, Rest...>,
                  stages> {
  using type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90TmaWarpSpecialized<stages, stages_d, fragment, true, true>, Rest...>;
};

// CUTLASS's main loop for CUTLASS's own kernel, in which every thread calls load_init() between the setting up of
// barriers and its first access to global memory.
template <class Mainloop>
struct WaitingMainloop : Mainloop {
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& problem_shape, typename Mainloop::Params const& params) const {
    wait_for_previous_kernel();
    return Mainloop::load_init(problem_shape, params);
  }
};

// The CUTLASS collectives of one row of the table. The TMA rounds fp32 operands to the nearest tf32 number when it
// copies them to shared memory.
template <DType input, GemmOutput output, int tile_m, int tile_n, int tile_k, int cluster_m, int cluster_n,
          class Schedule, ProductLayout layout>
struct GemmTypes {
  using Tile = cute::Shape<cute::Int<tile_m>, cute::Int<tile_n>, cute::Int<tile_k>>;
  using Cluster = cute::Shape<cute::Int<cluster_m>, cute::Int<cluster_n>, cute::_1>;
  using Element = ElementOf<input>;
  using OutElement = cute::conditional_t<output == GemmOutput::kFloat32, float, Element>;
  using X = OperandLayout<reads_columns_of_x(layout)>;
  using Weight = OperandLayout<reads_columns_of_weight(layout)>;
  static constexpr bool kReduceRows = output == GemmOutput::kRows;
  static constexpr bool kJoinsWeights = output == GemmOutput::kJoined;
  static constexpr int kAlignment = 16 / sizeof(Element);
  static constexpr int kOutAlignment = 16 / sizeof(OutElement);

  using Bias = fusion::Sm90RowBroadcast<0, Tile, Element, float, cute::Stride<cute::_0, cute::_1, int64_t>, kAlignment>;
  using PreActivation =
      fusion::Sm90EVT<fusion::Sm90Compute<cutlass::plus, float, float, cutlass::FloatRoundStyle::round_to_nearest>,
                      fusion::Sm90AccFetch, Bias>;
  // With fp32 operands or an fp32 result, the epilogue uses accurate functions instead of fast ones.
  static constexpr bool kAccurate = input == DType::kFloat32 || output == GemmOutput::kFloat32;
  static constexpr bool kSplit = kIsSplit<Schedule>;
  static constexpr bool kHasSource = !kSplit && fetches_operand({nullptr, input, output, tile_m, tile_n, tile_k,
                                                                 cluster_m, cluster_n, Schedule::kSchedule, layout});
  // Beside the tiles of the other schedules there is no room without a stage less.
  static constexpr bool kStagesOperands = cute::is_same_v<Schedule, Pingpong>;
  static constexpr int kStagedExtent = kStagesOperands ? std::max(tile_m, tile_n) : 0;
  using Visitor =
      Sm90ProgramVisitor<OutElement, Element, kReduceRows ? tile_m : 0,
                         cute::conditional_t<kAccurate, AccuratePrimitives, FastPrimitives>, kHasSource, kStagedExtent>;
  // A kernel of several weights adds their biases alone: it runs no program.
  using JoinedSum =
      fusion::Sm90EVT<fusion::Sm90Compute<cutlass::plus, OutElement, float, cutlass::FloatRoundStyle::round_to_nearest>,
                      fusion::Sm90AccFetch, JoinedBias<Tile, Element, kAlignment>>;
  // CUTLASS asks for the element type of the staging buffers even where the epilogue stores no matrix.
  template <class Visitors>
  struct CallbacksOf : Visitors {
    using Visitors::Visitors;
    using ElementAux = OutElement;
  };
  using Callbacks = CallbacksOf<cute::conditional_t<kJoinsWeights, JoinedSum, fusion::Sm90EVT<Visitor, PreActivation>>>;

  template <class SourceElement>
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, SourceElement, cutlass::layout::RowMajor,
      kOutAlignment, cute::conditional_t<kReduceRows, void, OutElement>, cutlass::layout::RowMajor, kOutAlignment,
      typename Schedule::Epilogue, Callbacks>::CollectiveOp;

  template <class Epilogue>
  using TmaMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, typename X::AsX, kAlignment, Element,
      typename Weight::AsWeight, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<Schedule::kEpilogues *
                                                        sizeof(typename Epilogue::SharedStorage)>,
      typename Schedule::Mainloop>::CollectiveOp;

  template <class Epilogue>
  using KernelWith = cute::conditional_t<
      cute::is_same_v<Schedule, Pingpong>,
      PingpongKernel<TmaMainloop<Epilogue>, Epilogue, cute::conditional_t<kJoinsWeights, SeveralWeights, OneWeight>>,
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, WaitingMainloop<TmaMainloop<Epilogue>>,
                                           Epilogue, cutlass::gemm::PersistentScheduler>>;

  static auto kernel() {
    using Plain = BuiltEpilogue<void>;
    if constexpr (kSplit) {
      using Mainloop = typename Schedule::template SplitMainloop<Tile>;
      static_assert(cute::size(Cluster{}) == 1, "products over planes run without clusters");
      static_assert(layout == ProductLayout::kNT, "planes are made in blocks of the weight's rows");
      return SplitKernel<Mainloop, typename WithOneStore<Plain>::type>{};
    } else if constexpr (kHasSource) {
      using Epilogue = typename WithSource<BuiltEpilogue<OutElement>, kSourceStages<OutElement, Schedule>>::type;
      constexpr int kStages = TmaMainloop<Epilogue>::DispatchPolicy::Stages;
      static_assert(kStages >= kEnoughStages || kStages == TmaMainloop<Plain>::DispatchPolicy::Stages,
                    "the buffers of the source cost the main loop a stage that it needs");
      return KernelWith<Epilogue>{};
    } else {
      return KernelWith<Plain>{};
    }
  }
  using Kernel = decltype(kernel());
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
    sm90_gemm(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
  extern __shared__ char shared_memory[];
  let_next_kernel_start();
  Kernel{}(params, shared_memory);  // waits for the previous kernel behind its own preparations
}

// The kernel arguments that depend on the main loop: operands and their strides.
template <class Kernel>
typename Kernel::Arguments make_product_arguments(GemmLaunch const& launch) {
  GemmProblem const& problem = launch.problem;
  GemmBuffers const& buffers = launch.buffers;
  typename Kernel::Arguments arguments{};
  arguments.problem_shape = {static_cast<int>(problem.m), static_cast<int>(problem.n), static_cast<int>(problem.k), 1};
  if constexpr (Kernel::kSplit) {
    arguments.mainloop = {buffers.planes_a, buffers.planes_b, buffers.converted_b};
    arguments.multiprocessors = problem.multiprocessors;
    arguments.slices = buffers.slices;
    arguments.guard = buffers.guard;
    arguments.run = buffers.run;
  } else {
    using Element = typename Kernel::ElementA;
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.mainloop.ptr_A = static_cast<Element const*>(buffers.a);
    arguments.mainloop.dA = Kernel::X::strides(problem.lda);
    arguments.mainloop.ptr_B = static_cast<Element const*>(buffers.b);
    arguments.mainloop.dB = Kernel::Weight::strides(problem.ldb);
    arguments.hw_info.sm_count = problem.multiprocessors;
    arguments.scheduler.max_swizzle_size = launch.swizzle;
    using RasterOrder = cute::remove_cvref_t<decltype(arguments.scheduler.raster_order)>;
    arguments.scheduler.raster_order = launch.raster_along_m ? RasterOrder::AlongM : RasterOrder::AlongN;
  }
  return arguments;
}

// What the epilogue runs its program with.
template <class Kernel>
void add_program(GemmLaunch const& launch, typename Kernel::Arguments& arguments) {
  GemmProblem const& problem = launch.problem;
  GemmBuffers const& buffers = launch.buffers;
  using Element = typename Kernel::Element;
  StagedOperands const staged = staged_by(launch.specialized);
  bool const reads_source = staged.source >= 0;
  if constexpr (Kernel::kHasSource) {
    // Where nothing is fetched, a descriptor is made all the same: of memory that can have one.
    Operand const& operand = launch.operands.items[reads_source ? staged.source : 0];
    void const* const data = reads_source ? operand.data : buffers.d;
    arguments.epilogue.ptr_C = static_cast<typename Kernel::ElementC const*>(data);
    int64_t const pitch = reads_source ? operand.strides[1] : pitch_of_result(problem);
    arguments.epilogue.dC = cute::make_stride(pitch, cute::_1{}, int64_t{0});
  }
  arguments.epilogue.thread = {{{}, {static_cast<Element const*>(buffers.bias), Element(0), {}}, {}},
                               {launch.program, launch.operands, buffers.partials, buffers.pre_activation,
                                static_cast<int>(problem.m), static_cast<int>(problem.n), problem.reduction,
                                reads_source, staged.rows, staged.columns, Kernel::kTileRows, Kernel::kTileColumns}};
}

// The columns of tiles at which the weights begin.
template <class Kernel>
WeightStarts starts_of(JoinedWeights const& weights) {
  WeightStarts starts{};
  int64_t first = 0;
  for (int k = 0; k < kMostJoinedWeights; ++k) {
    starts.items[k] = k < weights.count ? static_cast<int32_t>(first / Kernel::kTileColumns) : INT32_MAX;
    first += weights.items[k].columns;
  }
  return starts;
}

template <class Kernel>
typename Kernel::Arguments make_arguments(GemmLaunch const& launch) {
  GemmProblem const& problem = launch.problem;
  GemmBuffers const& buffers = launch.buffers;
  using Element = typename Kernel::Element;
  typename Kernel::Arguments arguments = make_product_arguments<Kernel>(launch);
  if constexpr (!cute::is_void_v<typename Kernel::ElementD>) {
    arguments.epilogue.ptr_D = static_cast<typename Kernel::ElementD*>(buffers.d);
  }
  arguments.epilogue.dD = cute::make_stride(pitch_of_result(problem), cute::_1{}, int64_t{0});
  if constexpr (Kernel::kJoinsWeights) {
    auto& biases = arguments.epilogue.thread.op_1;
    biases.starts = starts_of<Kernel>(buffers.joined);
    for (int k = 0; k < kMostJoinedWeights; ++k) {
      biases.items[k] = static_cast<Element const*>(buffers.joined.items[k].bias);
    }
  } else {
    add_program<Kernel>(launch, arguments);
  }
  return arguments;
}

// A descriptor of x by which the copy engine brings so many rows of a tile, which are all that there are. It takes
// longer to fill a row with zeros than to bring one: 1x8192x2048 took 16.2 us, and 64x8192x2048 12.2 (H200). What the
// other rows of the tile hold goes into rows of the result that nobody stores.
template <class Kernel, int rows>
void bring_rows(typename Kernel::Arguments const& arguments, typename Kernel::CollectiveMainloop::Params& params) {
  using Mainloop = typename Kernel::CollectiveMainloop;
  using Tile = typename Kernel::TileShape;
  constexpr int kColumns = cute::size<2>(Tile{});
  auto const [m, n, k, l] = arguments.problem_shape;
  // tf32 in place of fp32, as in CUTLASS's own: the copy engine rounds to it.
  auto const* const data = reinterpret_cast<typename Mainloop::InternalElementA const*>(arguments.mainloop.ptr_A);
  auto const x = cute::make_tensor(data, cute::make_layout(cute::make_shape(m, k, l), arguments.mainloop.dA));
  auto const layout = cute::tile_to_shape(typename Mainloop::SmemLayoutAtomA{},
                                          cute::make_shape(cute::Int<rows>{}, cute::Int<kColumns>{}));
  auto const copy =
      cute::make_tma_copy_A_sm90(typename Mainloop::GmemTiledCopyA{}, x, layout,
                                 cute::replace<0>(Tile{}, cute::Int<rows>{}), typename Kernel::ClusterShape{});
  params.tma_load_a.tma_desc_ = copy.tma_desc_;
  constexpr uint32_t kBytesOfRow = kColumns * sizeof(typename Kernel::ElementA);
  params.tma_transaction_bytes = Mainloop::TmaTransactionBytes - (cute::size<0>(Tile{}) - rows) * kBytesOfRow;
}

// Of x with fewer rows than a tile of 64: the main loop brings those rows.
template <class Kernel>
void bring_no_empty_rows(typename Kernel::Arguments const& arguments,
                         typename Kernel::CollectiveMainloop::Params& params) {
  constexpr bool kReadsRowsOfX = std::is_same_v<typename Kernel::X, OperandLayout<false>>;
  if constexpr (Kernel::kTileRows == 64 && cute::size(typename Kernel::ClusterShape{}) == 1 && kReadsRowsOfX) {
    int const m = cute::get<0>(arguments.problem_shape);
    if (m <= 8) {
      bring_rows<Kernel, 8>(arguments, params);
    } else if (m <= 16) {
      bring_rows<Kernel, 16>(arguments, params);
    } else if (m <= 32) {
      bring_rows<Kernel, 32>(arguments, params);
    } else if (m <= 48) {
      bring_rows<Kernel, 48>(arguments, params);
    }
  }
}

// With a main loop's parameters for each weight: those of a problem with as many columns. What is not there has the
// last one's, because descriptors of all are fetched.
template <class Kernel>
typename Kernel::Params make_params(GemmLaunch const& launch, typename Kernel::Arguments const& arguments) {
  if constexpr (Kernel::kSplit) {
    return Kernel::to_underlying_arguments(arguments, nullptr);
  } else if constexpr (!Kernel::kJoinsWeights) {
    auto params = Kernel::to_underlying_arguments(arguments, nullptr);
    bring_no_empty_rows<Kernel>(arguments, params.mainloop);
    return params;
  } else {
    using Mainloop = typename Kernel::CollectiveMainloop;
    JoinedWeights const& weights = launch.buffers.joined;
    typename Kernel::Params params{};
    static_cast<typename Kernel::Base::Params&>(params) = Kernel::to_underlying_arguments(arguments, nullptr);
    bring_no_empty_rows<Kernel>(arguments, params.mainloop);
    params.starts = starts_of<Kernel>(weights);
    for (int k = 0; k < kMostJoinedWeights; ++k) {
      JoinedWeight const& weight = weights.items[std::min(k, weights.count - 1)];
      auto own = arguments;
      own.mainloop.ptr_B = static_cast<typename Kernel::ElementB const*>(weight.weight);
      cute::get<1>(own.problem_shape) = static_cast<int>(weight.columns);
      params.mainloops[k] = Mainloop::to_underlying_arguments(own.problem_shape, own.mainloop, nullptr);
      bring_no_empty_rows<Kernel>(own, params.mainloops[k]);
    }
    return params;
  }
}

// Of a problem that find_rejection lets pass. CUTLASS's own can_implement wants lines of whole vectors besides, which
// the copy engine does not need: only where lines begin is of whole vectors.
template <class Kernel>
LaunchStatus launch_gemm(GemmLaunch const& launch, cudaStream_t stream) {
  auto const arguments = make_arguments<Kernel>(launch);
  static_assert(Kernel::SharedStorageSize <= 227 * 1024, "more shared memory than a multiprocessor has");
  static_assert(sizeof(typename Kernel::Params) <= 4096, "more parameters than every driver takes");
  auto params = make_params<Kernel>(launch, arguments);
  static LoadedKernel interpreting{reinterpret_cast<void const*>(sm90_gemm<Kernel>)};
  LoadedKernel& kernel = launch.specialized == nullptr ? interpreting : *launch.specialized;
  using Cluster = typename Kernel::ClusterShape;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), cute::size<2>(Cluster{})};
  attributes[1] = early_launch_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = Kernel::get_grid_shape(params);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return launch_kernel(kernel, config, &params);
}

}  // namespace sm90
}  // namespace cutfuse

// The derived type gives each kernel the name of its row, which is then a symbol of its own and what a profiler shows.
#define CUTFUSE_INSTANTIATE_SM90(name, input, output, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, layout)  \
  namespace cutfuse {                                                                                                  \
  using name##_types = sm90::GemmTypes<DType::input, GemmOutput::output, tile_m, tile_n, tile_k, cluster_m, cluster_n, \
                                       sm90::schedule, ProductLayout::k##layout>;                                      \
  struct name : name##_types::Kernel {                                                                                 \
    using Element = name##_types::Element;                                                                             \
    using X = name##_types::X;                                                                                         \
    using Weight = name##_types::Weight;                                                                               \
    static constexpr bool kSplit = name##_types::kSplit;                                                               \
    static constexpr bool kHasSource = name##_types::kHasSource;                                                       \
    static constexpr bool kJoinsWeights = name##_types::kJoinsWeights;                                                 \
    static constexpr uint16_t kTileRows = tile_m;                                                                      \
    static constexpr uint16_t kTileColumns = tile_n;                                                                   \
  };                                                                                                                   \
  LaunchStatus launch_##name(GemmLaunch const& launch, cudaStream_t stream) {                                          \
    return sm90::launch_gemm<name>(launch, stream);                                                                    \
  }                                                                                                                    \
  }
