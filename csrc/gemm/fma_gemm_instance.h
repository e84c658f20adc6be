// One fp32 kernel on CUDA cores for each row of plan/gemm_configs.def whose schedule is Fma or Dot. Only the generated
// translation units include this file; each instantiates some rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ceil_divide.h"
#include "common/loaded_kernel.h"
#include "gemm/fma_dot_kernel.h"
#include "gemm/fma_kernel.h"
#include "gemm/kernel_attributes.h"
#include "gemm/launch.h"

namespace cutfuse {
namespace fma {

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
  cudaError_t status = allow_shared_memory(kernel, Kernel::kSharedBytes);
  if (status != cudaSuccess) return {status, "setting the shared memory size"};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.tiles_m) * static_cast<unsigned>(params.tiles_n));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Kernel::kSharedBytes;
  config.stream = stream;
  void* arguments[] = {&params};
  status = cudaLaunchKernelExC(&config, kernel.function, arguments);
  if (status != cudaSuccess) cudaGetLastError();  // clears the error, which the next launch would otherwise report
  return {status, "launching the kernel"};
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
