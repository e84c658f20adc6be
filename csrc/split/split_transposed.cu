// Splits a matrix of any strides, such as a transposed one. Each tile of 64 rows and one block of columns passes
// through shared memory: it is read from device memory along the dimension with the smaller stride, and its parts are
// written along rows.
#include "common/vector_access.h"
#include "split/kernels.h"

namespace cutfuse {
namespace {

constexpr int kWarpLanes = 32;
constexpr int kRows = kSplitTileRows / kSplitGroups;  // rows of a thread
static_assert(kRows == kThreadRows, "as the tiles are planned");
constexpr int kWarpRows = kRows * kWarpLanes / kGroupLanes;
constexpr int kTileElements = kSplitTileRows * kSplitBlock;
// Floats from a column of the tile to the next. It is odd, so that at most two lanes of a warp access the same bank.
constexpr int kTilePitch = kSplitTileRows + 1;

struct TilePosition {
  int row;
  int column;
  int rows;  // rows and columns that are inside the matrix
  int columns;
};

// Loads 16-byte vectors of four neighbouring rows. Columns have to begin at a multiple of 16 bytes, and the number of
// rows to be a multiple of four.
__device__ __forceinline__ void load_vectors(SplitParameters const& parameters, TilePosition const& at, float* tile) {
  constexpr int kVectorRows = kVectorSize<float>;
  constexpr int kLoads = kTileElements / kVectorRows / kBlockThreads;
  constexpr int kColumnThreads = kSplitTileRows / kVectorRows;
  int const row = static_cast<int>(threadIdx.x) % kColumnThreads * kVectorRows;
  int const column = static_cast<int>(threadIdx.x) / kColumnThreads;
  float const* const data = parameters.source + at.row + row + (at.column + column) * parameters.column_stride;
  Vector<float> loaded[kLoads];
  CUTFUSE_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    int const step = load * (kSplitBlock / kLoads);
    loaded[load] = {};
    if (row < at.rows && column + step < at.columns) loaded[load] = load_vector(data + step * parameters.column_stride);
  }
  CUTFUSE_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    float values[kVectorRows];
    unpack(loaded[load], values);
    CUTFUSE_UNROLL
    for (int i = 0; i < kVectorRows; ++i) {
      tile[(column + load * (kSplitBlock / kLoads)) * kTilePitch + row + i] = values[i];
    }
  }
}

// Loads single elements. Neighbouring threads take neighbouring rows if along_rows is true, else neighbouring columns.
__device__ __forceinline__ void load_elements(SplitParameters const& parameters, TilePosition const& at,
                                              bool along_rows, float* tile) {
  static_assert(kSplitTileRows == kSplitBlock, "the same loop either way");
  constexpr int kLoads = kTileElements / kBlockThreads;
  constexpr int kStep = kBlockThreads / kSplitBlock;
  int const along = static_cast<int>(threadIdx.x) % kSplitBlock;
  int const across = static_cast<int>(threadIdx.x) / kSplitBlock;
  int64_t const along_stride = along_rows ? parameters.row_stride : parameters.column_stride;
  int64_t const across_stride = along_rows ? parameters.column_stride : parameters.row_stride;
  int const along_count = along_rows ? at.rows : at.columns;
  int const across_count = along_rows ? at.columns : at.rows;
  float const* data = parameters.source + at.row * parameters.row_stride + at.column * parameters.column_stride +
                      along * along_stride + across * across_stride;
  float loaded[kLoads];
  CUTFUSE_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    loaded[load] = 0.0f;
    if (along < along_count && across + load * kStep < across_count) loaded[load] = *data;
    data += kStep * across_stride;
  }
  float* const target = tile + (along_rows ? along + across * kTilePitch : along * kTilePitch + across);
  int const target_step = kStep * (along_rows ? kTilePitch : 1);
  CUTFUSE_UNROLL
  for (int load = 0; load < kLoads; ++load) target[load * target_step] = loaded[load];
}

// Row `index` of a thread's group. The two groups of a warp take alternate rows, which avoids bank conflicts.
__device__ __forceinline__ int row_in_tile(int index) {
  int const warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  int const group = static_cast<int>(threadIdx.x) / kGroupLanes % 2;
  return warp * kWarpRows + 2 * index + group;
}

// Replaces the largest magnitudes of a thread's rows by the largest of all rows that share their scale. Two
// neighbouring warps hold those rows, and exchange the values by of_warps in shared memory. All threads of the block
// call it.
__device__ __forceinline__ void share_largest(uint32_t (&largest)[kRows], uint32_t* of_warps) {
  static_assert(kSharedScaleRows == 2 * kWarpRows);
  int const warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  uint32_t const of_group = largest_of_all(largest);
  uint32_t const of_warp = max(of_group, __shfl_xor_sync(kWholeWarp, of_group, kGroupLanes));
  if (threadIdx.x % kWarpLanes == 0) of_warps[warp] = of_warp;
  __syncthreads();
  set_all(largest, max(of_warps[warp & ~1], of_warps[warp | 1]));
}

// The first lanes of a warp store the scales of its rows in one coalesced access.
__device__ __forceinline__ void store_scales(SplitParameters const& parameters, TilePosition const& at,
                                             ThreadScales const& scales) {
  int const lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  int64_t const of_block = static_cast<int64_t>(at.column / kSplitBlock) * parameters.scale_pitch;
  if (parameters.shares_scales) {
    int const row = static_cast<int>(threadIdx.x) / kWarpLanes * kWarpRows;
    if (lane != 0 || row % kSharedScaleRows != 0) return;
    parameters.planes.scales[of_block + (at.row + row) / kSharedScaleRows] = row < at.rows ? scales[0] : 1.0f;
    return;
  }
  float scale = 1.0f;
  CUTFUSE_UNROLL
  for (int index = 0; index < kRows; ++index) {
    float const candidate = __shfl_sync(kWholeWarp, scales[index], lane % 2 * kGroupLanes);
    if (lane / 2 == index) scale = candidate;
  }
  int const row = static_cast<int>(threadIdx.x) / kWarpLanes * kWarpRows + lane;
  if (lane < kWarpRows) parameters.planes.scales[of_block + at.row + row] = row < at.rows ? scale : 1.0f;
}

template <SplitScheme scheme>
__device__ __forceinline__ void split_tile(SplitParameters const& parameters, TilePosition const& at,
                                           ThreadValues& values, SplitFindings& findings, uint32_t* of_warps) {
  int const column = static_cast<int>(threadIdx.x) % kGroupLanes * kLaneElements;
  uint16_t* const high = first_part(parameters, at.row + row_in_tile(0), at.column + column);
  ThreadScales scales;
  scale_blocks<scheme>(values, scales, findings, parameters.shares_scales,
                       [&](uint32_t (&largest)[kRows]) { share_largest(largest, of_warps); });
  CUTFUSE_UNROLL
  for (int index = 0; index < kRows; ++index) {
    if (row_in_tile(index) >= at.rows) continue;
    store_parts<scheme>(values[index], high + 2 * index * kSplitBlock, parameters.plane_stride);
  }
  store_scales(parameters, at, scales);
}

template <SplitScheme scheme, bool vectors>
__global__ void __launch_bounds__(kBlockThreads, 4)
    split_transposed(__grid_constant__ SplitParameters const parameters) {
  __shared__ float tile_values[kSplitBlock * kTilePitch];
  __shared__ uint32_t of_warps[kBlockThreads / kWarpLanes];
  if (!begin_pass(parameters)) return;
  int const column = static_cast<int>(threadIdx.x) % kGroupLanes * kLaneElements;
  bool const along_rows = parameters.row_stride <= parameters.column_stride;
  // Consecutive tiles are below each other, because rows are adjacent in the source.
  int const count = parameters.row_tiles * parameters.column_tiles;
  SplitFindings findings;
  int elements = 0;
  CUTFUSE_NO_UNROLL
  for (int tile = static_cast<int>(blockIdx.x); tile < count; tile += static_cast<int>(gridDim.x)) {
    int const column_tile = tile / parameters.row_tiles;
    TilePosition at = {(tile - column_tile * parameters.row_tiles) * kSplitTileRows, column_tile * kSplitBlock, 0, 0};
    at.rows = extent_within(at.row, kSplitTileRows, parameters.rows);
    at.columns = extent_within(at.column, kSplitBlock, parameters.columns);
    elements += at.rows * at.columns;
    if constexpr (vectors) {
      load_vectors(parameters, at, tile_values);
    } else {
      load_elements(parameters, at, along_rows, tile_values);
    }
    __syncthreads();
    ThreadValues values;
    CUTFUSE_UNROLL
    for (int index = 0; index < kRows; ++index) {
      float const* const row = tile_values + column * kTilePitch + row_in_tile(index);
      CUTFUSE_UNROLL
      for (int i = 0; i < kLaneElements; ++i) values[index][i] = row[i * kTilePitch];
    }
    __syncthreads();
    split_tile<scheme>(parameters, at, values, findings, of_warps);
  }
  write_flags(findings, elements, parameters.planes.flags);
}

bool has_aligned_columns(SplitParameters const& parameters) {
  constexpr int kVectorRows = kVectorSize<float>;
  bool const strides =
      parameters.row_stride == 1 && (parameters.columns <= 1 || parameters.column_stride % kVectorRows == 0);
  return strides && parameters.rows % kVectorRows == 0 &&
         reinterpret_cast<uintptr_t>(parameters.source) % kVectorBytes == 0;
}

template <SplitScheme scheme>
cudaError_t launch_scheme(SplitParameters const& parameters, cudaStream_t stream) {
  auto* const kernel =
      has_aligned_columns(parameters) ? &split_transposed<scheme, true> : &split_transposed<scheme, false>;
  return launch(kernel, parameters.blocks, kBlockThreads, stream, parameters);
}

}  // namespace

cudaError_t launch_split_transposed(SplitParameters const& parameters, cudaStream_t stream) {
  return parameters.scheme == SplitScheme::kSplit3 ? launch_scheme<SplitScheme::kSplit3>(parameters, stream)
                                                   : launch_scheme<SplitScheme::kSplit6>(parameters, stream);
}

}  // namespace cutfuse
