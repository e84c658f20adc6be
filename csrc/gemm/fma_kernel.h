// fp32 products by fused multiply-adds on CUDA cores, with the epilogue program behind them in the same kernel: for
// layers so small that the launches of cuBLAS's product and of what follows it take longer than the product.
#pragma once

#include "gemm/fma_epilogue.h"
#include "gemm/fma_mainloop.h"

namespace cutfuse::fma {

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

}  // namespace cutfuse::fma
