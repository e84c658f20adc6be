// fp32 products by fused multiply-adds on CUDA cores, with the epilogue program behind them in the same kernel: for
// layers so small that the launches of cuBLAS's product and of what follows it take longer than the product.
//
// One kernel for each row of plan/gemm_configs.def whose schedule is Fma or Dot. Only the generated translation units
// include this file; each instantiates some rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/division.h"
#include "common/launch.h"
#include "common/loaded_kernel.h"
#include "epilogue/sm90_epilogue_function.h"
#include "gemm/dispatch.h"
#include "gemm/fma_mainloop.h"

namespace cutfuse {
namespace fma {

// What the fp32 kernels on CUDA cores do with a fragment of z: bias, program and stores. A thread holds the elements
// that a thread of wgmma holds, so that the programs of all GEMM kernels are the same.

struct Params {
  sm90::EpilogueParams epilogue;  // with M and N
  OperandMatrix x;
  OperandMatrix weight;
  float const* bias;  // [N]; null for none
  float* result;      // [M, N] contiguous
  int k;
  int tiles_m;
  int tiles_n;
  bool raster_along_m;
};

using EpilogueFragment = Fragment<sm90::kFragmentSize>;

__device__ __forceinline__ void add_bias(float const* bias, int n, int columns, EpilogueFragment& z) {
  CUTFUSE_UNROLL
  for (int i = 0; i < sm90::kFragmentSize; ++i) {
    int const column = n + sm90::fragment_column(i);
    if (column < columns) z.values[i] += bias[column];
  }
}

template <int count>
__device__ __forceinline__ void store_fragment(float* matrix, int rows, int columns, int m, int n,
                                               EpilogueFragment const& values) {
  bool const in_pairs = columns % 2 == 0 && reinterpret_cast<uintptr_t>(matrix) % sizeof(float2) == 0;  // n is even
  CUTFUSE_UNROLL
  for (int i = 0; i < count; i += 2) {
    int const row = m + sm90::fragment_row(i);
    int const column = n + sm90::fragment_column(i);
    if (row >= rows || column >= columns) continue;
    float* const to = matrix + static_cast<int64_t>(row) * columns + column;
    if (in_pairs) {
      *reinterpret_cast<float2*>(to) = make_float2(values.values[i], values.values[i + 1]);
    } else {
      to[0] = values.values[i];
      if (column + 1 < columns) to[1] = values.values[i + 1];
    }
  }
}

// m, n: of the thread's first element. count: how many of the elements are the thread's own; the others are not stored.
template <int count = sm90::kFragmentSize>
__device__ __forceinline__ void finish_fragment(Params const& params, sm90::EpilogueParams const* epilogue, int m,
                                                int n, EpilogueFragment& z) {
  int const rows = params.epilogue.rows;
  int const columns = params.epilogue.columns;
  if (params.bias != nullptr) add_bias(params.bias, n, columns, z);
  void* const pre_activation = sm90::pre_activation_of(epilogue);
  if (pre_activation != nullptr) store_fragment<count>(static_cast<float*>(pre_activation), rows, columns, m, n, z);
  EpilogueFragment const y = sm90::run_epilogue<AccuratePrimitives>(epilogue, m, n, z);
  store_fragment<count>(params.result, rows, columns, m, n, y);
}

// A warp's sums of its part in shared memory: [part, slice, row, column].
template <class Shape>
__device__ __forceinline__ float* sums_of(float* shared, int part, int slice) {
  return shared + (part * Shape::kSlices + slice) * Shape::kWarpRows * Shape::kSumPitch;
}

template <class Shape>
__device__ __forceinline__ void store_sums(float* shared, WarpPart const& part, Sums<Shape> const& sums) {
  using X = typename Shape::X;
  using Weight = typename Shape::Weight;
  float* const own = sums_of<Shape>(shared, part.index, part.slice);
  CUTFUSE_UNROLL
  for (int i = 0; i < Shape::kThreadRows; ++i) {
    float* const row = own + X::line_of(lane_along_m(), i) * Shape::kSumPitch;
    if constexpr (Weight::kAcross) {
      CUTFUSE_UNROLL
      for (int j = 0; j < kThreadColumns; j += kVector) {
        *reinterpret_cast<float4*>(row + Weight::line_of(lane_along_n(), j)) =
            make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
      }
    } else {
      CUTFUSE_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) row[Weight::line_of(lane_along_n(), j)] = sums[i][j];
    }
  }
}

// The elements of a part that a thread of wgmma would hold, with the slices' sums added in their order, so that two
// runs agree bit for bit. row, column: of the first element in the part.
template <class Shape>
__device__ __forceinline__ EpilogueFragment add_slices(float* shared, int part, int row, int column) {
  EpilogueFragment z = {};
  CUTFUSE_UNROLL
  for (int slice = 0; slice < Shape::kSlices; ++slice) {
    float const* const first = sums_of<Shape>(shared, part, slice) + row * Shape::kSumPitch + column;
    CUTFUSE_UNROLL
    for (int i = 0; i < sm90::kFragmentSize; i += 2) {
      auto const* const pair = first + sm90::fragment_row(i) * Shape::kSumPitch + sm90::fragment_column(i);
      float2 const values = *reinterpret_cast<float2 const*>(pair);
      z.values[i] += values.x;
      z.values[i + 1] += values.y;
    }
  }
  return z;
}

// The warps of a part's slices share out its fragments.
template <class Shape>
__device__ __forceinline__ void finish_part(Params const& params, sm90::EpilogueParams const* epilogue, float* shared,
                                            WarpPart const& part, int first_m, int first_n) {
  constexpr int kFragmentRows = sm90::kRowsPerFragment * kLanesAlongM;
  constexpr int kFragments = Shape::kWarpRows / kFragmentRows;
  int const column = lane_along_n() * 2;
  int const n = first_n + part.n + column;
  CUTFUSE_NO_UNROLL
  for (int fragment = part.slice; fragment < kFragments; fragment += Shape::kSlices) {
    int const row = fragment * kFragmentRows + lane_along_m();
    int const m = first_m + part.m + row;
    EpilogueFragment z = add_slices<Shape>(shared, part.index, row, column);
    finish_fragment(params, epilogue, m, n, z);
  }
}

template <class Shape>
__device__ __forceinline__ void multiply_tile(Params const& params, float* shared, sm90::EpilogueParams* epilogue) {
  sm90::copy_to_shared(params.epilogue, epilogue, static_cast<int>(threadIdx.x));
  int const tile = static_cast<int>(blockIdx.x);
  int const tile_m = params.raster_along_m ? tile % params.tiles_m : tile / params.tiles_n;
  int const tile_n = params.raster_along_m ? tile / params.tiles_m : tile % params.tiles_n;
  int const first_m = tile_m * Shape::X::kTile;
  int const first_n = tile_n * Shape::Weight::kTile;
  WarpPart const part = part_of_warp<Shape>();
  Sums<Shape> sums = {};
  MainLoop<Shape>(params.x, params.weight, first_m, first_n, params.k, shared, part).run(sums);
  store_sums<Shape>(shared, part, sums);
  __syncthreads();
  finish_part<Shape>(params, epilogue, shared, part, first_m, first_n);
}

// fp32 products of few rows, at the rate at which the weight comes from memory: a block computes eight columns of the
// result for eight rows, and its warps share out K. A warp reads the lines of x and of the weight straight into
// registers: only x is read more than once.

constexpr int kDotRows = 8;
constexpr int kDotColumns = 8;
constexpr int kDotSums = kDotRows * kDotColumns;
constexpr int kDotStep = kThreads * kVector;  // of K, that a block reads at once

// Four neighbours of a line, 0 behind its end.
__device__ __forceinline__ float4 load_neighbours(float const* line, int k, int end, bool has_vectors) {
  if (has_vectors && k + kVector <= end) return *reinterpret_cast<float4 const*>(line + k);
  float values[kVector];
  CUTFUSE_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] = k + i < end ? line[k + i] : 0.0f;
  return make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ void add_products(float4 const& x, float4 const& y, float& sum) {
  sum = ::fmaf(x.x, y.x, sum);
  sum = ::fmaf(x.y, y.y, sum);
  sum = ::fmaf(x.z, y.z, sum);
  sum = ::fmaf(x.w, y.w, sum);
}

// Sums over the lanes of a warp: afterwards a lane has sums 2 * lane and 2 * lane + 1 in its first two places. In each
// step two lanes exchange halves of what they have.
__device__ __forceinline__ void add_lanes(float (&sums)[kDotSums]) {
  int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
  CUTFUSE_UNROLL
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    int const half = distance * 2;
    bool const is_upper = (lane & distance) != 0;
    CUTFUSE_UNROLL
    for (int i = 0; i < kDotSums / 2; ++i) {
      if (i >= half) break;
      float const sent = is_upper ? sums[i] : sums[i + half];
      float const kept = is_upper ? sums[i + half] : sums[i];
      sums[i] = kept + __shfl_xor_sync(0xffffffff, sent, distance);
    }
  }
}

// This warp's part of the sums of all K: sum m * 8 + n is of row m and column n.
__device__ __forceinline__ void add_slice(Params const& params, int first_m, int first_n, float (&sums)[kDotSums]) {
  int const rows = min(params.x.extent - first_m, kDotRows);
  int const columns = min(params.weight.extent - first_n, kDotColumns);
  float const* const x = params.x.data + first_m * params.x.pitch;
  float const* const weight = params.weight.data + first_n * params.weight.pitch;
  CUTFUSE_NO_UNROLL
  for (int k = static_cast<int>(threadIdx.x) * kVector; k < params.k; k += kDotStep) {
    float4 lines[kDotColumns];
    CUTFUSE_UNROLL
    for (int n = 0; n < kDotColumns; ++n) {
      lines[n] = n < columns ? load_neighbours(weight + n * params.weight.pitch, k, params.k, params.weight.has_vectors)
                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    CUTFUSE_UNROLL
    for (int m = 0; m < kDotRows; ++m) {
      if (m >= rows) break;
      float4 const line = load_neighbours(x + m * params.x.pitch, k, params.k, params.x.has_vectors);
      CUTFUSE_UNROLL
      for (int n = 0; n < kDotColumns; ++n) add_products(line, lines[n], sums[m * kDotColumns + n]);
    }
  }
}

__device__ __forceinline__ void multiply_rows(Params const& params, float2 (&shared)[kWarps][kWarpSize],
                                              sm90::EpilogueParams* epilogue) {
  sm90::copy_to_shared(params.epilogue, epilogue, static_cast<int>(threadIdx.x));
  int const tile = static_cast<int>(blockIdx.x);
  int const first_m = tile % params.tiles_m * kDotRows;
  int const first_n = tile / params.tiles_m * kDotColumns;
  int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float sums[kDotSums] = {};
  add_slice(params, first_m, first_n, sums);
  add_lanes(sums);
  shared[warp][lane] = make_float2(sums[0], sums[1]);
  __syncthreads();
  if (warp > 0) return;
  EpilogueFragment z = {};
  CUTFUSE_UNROLL
  for (int other = 0; other < kWarps; ++other) {
    z.values[0] += shared[other][lane].x;
    z.values[1] += shared[other][lane].y;
  }
  finish_fragment<2>(params, epilogue, first_m + lane_along_m(), first_n + lane_along_n() * 2, z);
}

// The schedules: tiles of the operands in shared memory, and dot products of lines.
template <int tile_m, int tile_n, int tile_k, ProductLayout layout>
struct Fma {
  using Shape = TileShape<tile_m, tile_n, tile_k, reads_columns_of_x(layout), reads_columns_of_weight(layout)>;
  static constexpr int kTileM = tile_m;
  static constexpr int kTileN = tile_n;
  static constexpr int kSharedBytes = Shape::kSharedBytes;
  // How many blocks of a multiprocessor the registers suffice for. With registers for two, a tile of 32x32 alone takes
  // up to a fifth longer, and many of them together 10% less (H200).
  static constexpr int kBlocks = Shape::kThreadRows < 4 ? 2 : 1;

  static __device__ __forceinline__ void run(Params const& params, sm90::EpilogueParams* epilogue) {
    extern __shared__ float4 shared_memory[];
    multiply_tile<Shape>(params, reinterpret_cast<float*>(shared_memory), epilogue);
  }
};

template <int tile_m, int tile_n, int tile_k, ProductLayout layout>
struct Dot {
  static constexpr int kTileM = tile_m;
  static constexpr int kTileN = tile_n;
  static constexpr int kSharedBytes = 0;
  static constexpr int kBlocks = 2;
  static_assert(tile_m == kDotRows && tile_n == kDotColumns && tile_k == kDotStep, "the one tile of this schedule");
  static_assert(layout == ProductLayout::kNT, "lines along K are read");

  static __device__ __forceinline__ void run(Params const& params, sm90::EpilogueParams* epilogue) {
    __shared__ float2 sums[kWarps][kWarpSize];
    multiply_rows(params, sums, epilogue);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads, Kernel::kBlocks) fma_gemm(__grid_constant__ Params const params) {
  __shared__ sm90::EpilogueParams epilogue;
  begin_behind_previous_kernel();
  Kernel::run(params, &epilogue);
}

inline OperandMatrix operand_matrix(void const* data, int64_t pitch, int extent) {
  bool const is_aligned = reinterpret_cast<uintptr_t>(data) % (kVector * sizeof(float)) == 0;
  return {static_cast<float const*>(data), pitch, extent, is_aligned && pitch % kVector == 0};
}

template <class Kernel>
Params make_params(GemmLaunch const& launch) {
  GemmProblem const& problem = launch.problem;
  GemmBuffers const& buffers = launch.buffers;
  auto const m = static_cast<int>(problem.m);
  auto const n = static_cast<int>(problem.n);
  Params params = {};
  params.epilogue.program = launch.program;
  params.epilogue.operands = launch.operands;
  params.epilogue.pre_activation = buffers.pre_activation;
  params.epilogue.rows = m;
  params.epilogue.columns = n;
  params.epilogue.reduction = Reduction::kNone;
  params.epilogue.tile_rows = Kernel::kTileM;
  params.epilogue.tile_columns = Kernel::kTileN;
  params.x = operand_matrix(buffers.a, problem.lda, m);
  params.weight = operand_matrix(buffers.b, problem.ldb, n);
  params.bias = static_cast<float const*>(buffers.bias);
  params.result = static_cast<float*>(buffers.d);
  params.k = static_cast<int>(problem.k);
  params.tiles_m = ceil_divide(m, Kernel::kTileM);
  params.tiles_n = ceil_divide(n, Kernel::kTileN);
  params.raster_along_m = launch.raster_along_m;
  return params;
}

template <class Kernel>
LaunchStatus launch_gemm(GemmLaunch const& launch, cudaStream_t stream) {
  Params params = make_params<Kernel>(launch);
  static LoadedKernel interpreting{reinterpret_cast<void const*>(fma_gemm<Kernel>)};
  LoadedKernel& kernel = launch.specialized == nullptr ? interpreting : *launch.specialized;
  cudaLaunchAttribute attribute = early_launch_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.tiles_m) * static_cast<unsigned>(params.tiles_n));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Kernel::kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return launch_kernel(kernel, config, &params);
}

}  // namespace fma
}  // namespace cutfuse

// The struct gives each kernel the name of its row, which is then a symbol of its own and what a profiler shows.
#define CUTFUSE_INSTANTIATE_FMA(name, input, output, tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, layout) \
  namespace cutfuse {                                                                                                \
  struct name : fma::schedule<tile_m, tile_n, tile_k, ProductLayout::k##layout> {};                                  \
  LaunchStatus launch_##name(GemmLaunch const& launch, cudaStream_t stream) {                                        \
    return fma::launch_gemm<name>(launch, stream);                                                                   \
  }                                                                                                                  \
  }
