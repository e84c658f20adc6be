// fp32 products of few rows, at the rate at which the weight comes from memory: a block computes eight columns of the
// result for eight rows, and its warps share out K. A warp reads the lines of x and of the weight straight into
// registers: only x is read more than once.
#pragma once

#include "gemm/fma_epilogue.h"
#include "gemm/fma_mainloop.h"

namespace cutfuse::fma {

constexpr int kDotRows = 8;
constexpr int kDotColumns = 8;
constexpr int kDotSums = kDotRows * kDotColumns;
constexpr int kDotStep = kThreads * kVector;  // of K, that a block reads at once

// Four neighbours of a line, 0 behind its end.
__device__ __forceinline__ float4 load_neighbours(float const* line, int k, int end, bool has_vectors) {
  if (has_vectors && k + kVector <= end) return __ldg(reinterpret_cast<float4 const*>(line + k));
  float values[kVector];
  CUTFUSE_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] = k + i < end ? __ldg(line + k + i) : 0.0f;
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

}  // namespace cutfuse::fma
