// The epilogue program as a node of CUTLASS's sm_90 epilogue visitor tree: takes the pre-activation fragment, runs the
// program over it, and hands the result to the TMA store or folds it into one partial state per row and N tile.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>

#include "epilogue/sm90_epilogue_function.h"
#include "reduce/reductions.h"

namespace cutfuse {

namespace sm90 {

// The four lanes that share rows hold two neighbouring columns of each group of eight. Afterwards lane k holds all
// eight columns of group k: words[j] of lane k and words[k] of lane j change places.
__device__ __forceinline__ void transpose_among_lanes(uint32_t (&words)[kLanesPerRow], int lane) {
  CUTFUSE_UNROLL
  for (int distance = 1; distance < kLanesPerRow; distance *= 2) {
    bool const upper = (lane & distance) != 0;
    CUTFUSE_UNROLL
    for (int j = 0; j < kLanesPerRow; ++j) {
      if ((j & distance) != 0) continue;
      uint32_t const sent = upper ? words[j] : words[j + distance];
      uint32_t const received = __shfl_xor_sync(0xffffffff, sent, distance);
      (upper ? words[j] : words[j + distance]) = received;
    }
  }
}

// Sixteen bytes a lane: the lanes of a row write 64 bytes of it, two whole sectors.
template <class Element>
__device__ __forceinline__ void store_pre_activation_words(EpilogueParams const* params, int m, int n,
                                                           uint32_t const (&words)[kFragmentSize / 2]) {
  int const lane = static_cast<int>(threadIdx.x) % kLanesPerRow;
  int const column = n + (kColumnsPerGroup - 2) * lane;
  CUTFUSE_UNROLL
  for (int row = 0; row < kRowsPerFragment; ++row) {
    uint32_t own[kLanesPerRow];
    CUTFUSE_UNROLL
    for (int group = 0; group < kLanesPerRow; ++group) own[group] = words[group * kRowsPerFragment + row];
    transpose_among_lanes(own, lane);
    int const own_row = m + fragment_row(row * 2);
    if (own_row < params->rows && column < params->columns) {
      Element* const first = static_cast<Element*>(params->pre_activation);
      int64_t const offset = static_cast<int64_t>(own_row) * params->columns + column;
      *reinterpret_cast<uint4*>(first + offset) = make_uint4(own[0], own[1], own[2], own[3]);
    }
  }
}

// The lanes of a row write 32 bytes of it at a time, one whole sector.
__device__ __forceinline__ void store_pre_activation_pairs(EpilogueParams const* params, int m, int n,
                                                           Fragment<kFragmentSize> const& z) {
  CUTFUSE_UNROLL
  for (int i = 0; i < kFragmentSize; i += 2) {
    int const row = m + fragment_row(i);
    int const column = n + fragment_column(i);
    if (row < params->rows && column < params->columns) {
      float* const first = static_cast<float*>(params->pre_activation);
      *reinterpret_cast<float2*>(first + static_cast<int64_t>(row) * params->columns + column) =
          make_float2(z.values[i], z.values[i + 1]);
    }
  }
}

// Rows begin at multiples of 16 bytes: see find_rejection. Not inlined, for the reason that run_epilogue is not.
template <class Element>
static __device__ __noinline__ void store_pre_activation(EpilogueParams const* params, int m, int n,
                                                         Fragment<kFragmentSize> z) {
  if constexpr (sizeof(Element) == sizeof(float)) {
    store_pre_activation_pairs(params, m, n, z);
  } else {
    using Pair = cutlass::Array<Element, 2>;
    static_assert(sizeof(Pair) == sizeof(uint32_t));
    uint32_t words[kFragmentSize / 2];
    CUTFUSE_UNROLL
    for (int i = 0; i < kFragmentSize; i += 2) {
      cutlass::Array<float, 2> const values = {z.values[i], z.values[i + 1]};
      Pair const rounded = cutlass::NumericArrayConverter<Element, float, 2>{}(values);
      words[i / 2] = reinterpret_cast<uint32_t const&>(rounded);
    }
    store_pre_activation_words<Element>(params, m, n, words);
  }
}

// What rows are reduced by. A kernel that has a program compiled in has a number at this mark:
// specialize/kernel_text.cpp.
__device__ __forceinline__ Reduction reduction_of(EpilogueParams const* params) {
  auto code = static_cast<uint32_t>(params->reduction);
  asm("mov.b32 %0, %0; // reduction of the rows" : "+r"(code));
  return static_cast<Reduction>(code);
}

// Folds a fragment into this thread's states in shared memory, one for each row of the fragment. n: its first column.
// A call of its own, so that the interpreter's registers are free again.
static __device__ __noinline__ void reduce_rows(EpilogueParams const* params, int n, Fragment<kFragmentSize> y,
                                                RowState* states) {
  Reduction const reduction = reduction_of(params);
  float const outside = identity_any(reduction);
  CUTFUSE_UNROLL
  for (int row = 0; row < kRowsPerFragment; ++row) {
    float values[kColumnsPerFragment];
    CUTFUSE_UNROLL
    for (int j = 0; j < kColumnsPerFragment; ++j) {
      int const i = (j >> 1) * 4 + row * 2 + (j & 1);
      values[j] = n + fragment_column(i) < params->columns ? y.values[i] : outside;
    }
    RowState& stored = states[fragment_row(row * 2) * kLanesPerRow];
    RowState state = stored;
    accumulate_any<kColumnsPerFragment>(reduction, state, values);
    stored = state;
  }
}

}  // namespace sm90

namespace fusion = cutlass::epilogue::fusion;

// A node of CUTLASS's visitor tree whose parameters are its arguments.
template <class Node, class Given>
struct NodeOf : Node {
  using Node::Node;
  using Arguments = Given;
  using Params = Given;

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
};

// ElementOutput: what the fragment is rounded to for the store. reduced_rows: 0 stores the tile; otherwise the rows of
// a tile, whose partial states are written instead. Primitives: see primitives.h. has_source: CUTLASS's C is the
// operand that EpilogueParams::reads_source asks for. staged_extent: of the longer side of a tile where operands are
// staged, 0 elsewhere. ElementPreActivation: what z is rounded to where it is stored.
template <class ElementOutput, class ElementPreActivation, int reduced_rows, class Primitives, bool has_source,
          int staged_extent>
struct Sm90ProgramVisitor : NodeOf<fusion::Sm90VisitorImpl<>, sm90::EpilogueParams> {
  static constexpr bool kReduceRows = reduced_rows > 0;
  struct SharedStorage {
    sm90::EpilogueStorage<staged_extent> epilogue;
    // One state for each row of the tile and each of the four lanes that share it.
    RowState states[kReduceRows ? reduced_rows * sm90::kLanesPerRow : 1];
  };

  using Params = sm90::EpilogueParams;

  CUTLASS_HOST_DEVICE Sm90ProgramVisitor() {}
  CUTLASS_HOST_DEVICE Sm90ProgramVisitor(Params const& kernel_params, SharedStorage const& storage)
      : params(&kernel_params), shared(const_cast<SharedStorage*>(&storage)) {}

  Params const* params = nullptr;
  SharedStorage* shared = nullptr;

  CUTLASS_DEVICE bool is_producer_load_needed() const { return has_source && params->reads_source; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return is_producer_load_needed(); }

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::ProducerLoadArgs<Args...> const&) {
    return fusion::EmptyProducerLoadCallbacks{};
  }

  // source: this thread's elements of the subtile that CUTLASS has fetched of C.
  template <class CoordTensor, int subtiles_m, int threads, class SourceTensor>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    Params const* kernel_params;
    sm90::EpilogueStorage<staged_extent>* storage;
    CoordTensor coordinates;  // of this thread's elements, relative to its first one
    int first_m;
    int first_n;
    RowState* states;  // of this thread's first row
    int tile_m;
    int tile_n;
    int thread;
    bool tile_inside;  // a cluster may hold a tile that lies past the last column
    SourceTensor const* source;

    CUTLASS_DEVICE auto relative_position(int epi_v, int epi_m, int epi_n) const {
      return coordinates(cute::_, cute::_, cute::_, epi_m, epi_n)(epi_v * sm90::kFragmentSize);
    }
    CUTLASS_DEVICE int relative_m(int epi_m) const { return cute::get<0>(relative_position(0, epi_m, 0)); }

    CUTLASS_DEVICE RowState* states_of(int epi_m) const { return states + relative_m(epi_m) * sm90::kLanesPerRow; }

    CUTLASS_DEVICE Params* params() const { return &storage->params; }

    CUTLASS_DEVICE void begin() {
      sm90::copy_to_shared(*kernel_params, params(), thread);
      if constexpr (staged_extent > 0) sm90::stage_operands<threads>(*kernel_params, *storage, tile_m, tile_n, thread);
      if constexpr (kReduceRows) {
        Reduction const reduction = sm90::reduction_of(kernel_params);
        for_each_row([&](RowState& state, int) { state = initial_state_any(reduction); });
      }
    }

    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    template <class ElementAccumulator, class ElementInput, int FragmentSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<ElementAccumulator, FragmentSize> const&, int epi_v, int epi_m, int epi_n,
                              cutlass::Array<ElementInput, FragmentSize> const& input) {
      static_assert(FragmentSize == sm90::kFragmentSize, "the interpreter is compiled for 64x32 subtiles");
      Fragment<FragmentSize> z;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < FragmentSize; ++i) {
        z.values[i] = input[i];
      }
      auto const relative = relative_position(epi_v, epi_m, epi_n);
      int const m = first_m + static_cast<int>(cute::get<0>(relative));
      int const n = first_n + static_cast<int>(cute::get<1>(relative));
      if constexpr (!kReduceRows) {
        if (sm90::pre_activation_of(params()) != nullptr)
          sm90::store_pre_activation<ElementPreActivation>(params(), m, n, z);
      }
      Fragment<FragmentSize> const y = run(m, n, z);
      cutlass::Array<float, FragmentSize> result;
      if constexpr (kReduceRows) {
        sm90::reduce_rows(params(), n, y, states_of(epi_m));
        result.clear();
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < FragmentSize; ++i) {
          result[i] = y.values[i];
        }
      }
      return cutlass::NumericArrayConverter<ElementOutput, float, FragmentSize>{}(result);
    }

    template <int FragmentSize>
    CUTLASS_DEVICE Fragment<FragmentSize> run(int m, int n, Fragment<FragmentSize> const& z) const {
      if constexpr (has_source) {
        static_assert(cute::cosize_v<typename SourceTensor::layout_type> == FragmentSize, "one fragment of a subtile");
        constexpr int kWords = FragmentSize * sizeof(typename SourceTensor::value_type) / sizeof(uint32_t);
        auto const words = cute::recast<uint32_t>(*source);
        sm90::SourceFragment<kWords> fragment;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWords; ++i) fragment.values[i] = words(i);
        return sm90::run_epilogue<Primitives>(params(), m, n, z, fragment);
      } else {
        return sm90::run_epilogue<Primitives>(params(), m, n, z);
      }
    }

    // The four lanes that share a row hold its columns of this tile between them; a butterfly folds their states in an
    // order that depends on nothing but the layout, so two runs agree bit for bit.
    CUTLASS_DEVICE void end() {
      if constexpr (kReduceRows) {
        Reduction const reduction = sm90::reduction_of(kernel_params);
        bool const first_lane = cutlass::canonical_lane_idx() % sm90::kLanesPerRow == 0;
        for_each_row([&](RowState& stored, int m) {
          RowState state = stored;
          CUTLASS_PRAGMA_UNROLL
          for (int distance = 1; distance < sm90::kLanesPerRow; distance *= 2) {
            RowState const other = {__shfl_xor_sync(0xffffffff, state.a, distance),
                                    __shfl_xor_sync(0xffffffff, state.b, distance)};
            state = combine_any(reduction, state, other);
          }
          if (first_lane && m < kernel_params->rows && tile_inside) {
            int64_t const index = static_cast<int64_t>(tile_n) * kernel_params->rows + m;
            store_partial_any(reduction, kernel_params->partials, index, state);
          }
        });
      }
    }

    template <class Function>
    CUTLASS_DEVICE void for_each_row(Function const& function) {
      CUTLASS_PRAGMA_UNROLL
      for (int subtile = 0; subtile < subtiles_m; ++subtile) {
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < sm90::kRowsPerFragment; ++row) {
          int const below = sm90::fragment_row(row * 2);
          function(states_of(subtile)[below * sm90::kLanesPerRow], first_m + relative_m(subtile) + below);
        }
      }
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    using CoordTensor = cute::remove_cvref_t<decltype(args.tCcD)>;
    using SourceTensor = cute::remove_cvref_t<decltype(args.tCrC)>;
    constexpr int kSubtilesM = decltype(cute::size<3>(args.tCcD))::value;
    int const row_in_tile = static_cast<int>(cute::get<0>(args.residue_cD) - cute::get<0>(args.residue_tCcD));
    int const first_state = row_in_tile * sm90::kLanesPerRow + cutlass::canonical_lane_idx() % sm90::kLanesPerRow;
    constexpr int kThreads = decltype(cute::size(args.tiled_mma))::value;
    return Callbacks<CoordTensor, kSubtilesM, kThreads, SourceTensor>{
        {},
        params,
        &shared->epilogue,
        args.tCcD,
        params->rows - static_cast<int>(cute::get<0>(args.residue_tCcD)),
        params->columns - static_cast<int>(cute::get<1>(args.residue_tCcD)),
        shared->states + (kReduceRows ? first_state : 0),
        static_cast<int>(cute::get<0>(args.tile_coord_mnkl)),
        static_cast<int>(cute::get<1>(args.tile_coord_mnkl)),
        args.thread_idx,
        cute::get<1>(args.residue_cD) > 0,
        &args.tCrC};
  }
};

}  // namespace cutfuse
