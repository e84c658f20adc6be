// Splits a matrix with contiguous rows. In an iteration, a group of sixteen lanes takes a block of 64 columns in four
// rows, so that each thread has four 16-byte loads in flight. Eight would not fit into a thread's 64 registers, and
// ptxas would issue them one after another. The two groups of a warp take rows below each other, so that a warp stores
// whole 32-byte sectors of scales. Where rows share scales, the groups of several warps exchange their largest
// magnitudes.
#include <climits>

#include "common/vector_access.h"
#include "split/kernels.h"

namespace cutfuse {
namespace {

constexpr int kRows = kSplitGroupRows;
static_assert(kRows == kThreadRows && kBlockThreads == kSplitGroups * kGroupLanes, "as the tiles are planned");

// The first row and column of a thread's elements, and how many of its rows are inside the matrix.
struct RowsPosition {
  int row;
  int column;
  int rows;
};

// vectors: all rows begin at a multiple of 16 bytes and have a multiple of four elements.
template <bool vectors>
__device__ __forceinline__ void load_rows(SplitParameters const& parameters, RowsPosition const& at,
                                          ThreadValues& values) {
  float const* data = parameters.source + at.row * parameters.row_stride + at.column;
  if constexpr (vectors) {
    bool const inside = at.column < parameters.columns;
    Vector<float> loaded[kRows];
    CUTFUSE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      loaded[row] = {};
      if (inside && row < at.rows) loaded[row] = load_vector(data);
      data += parameters.row_stride;
    }
    CUTFUSE_UNROLL
    for (int row = 0; row < kRows; ++row) unpack(loaded[row], values[row]);
  } else {
    CUTFUSE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTFUSE_UNROLL
      for (int i = 0; i < kLaneElements; ++i) {
        values[row][i] = 0.0f;
        if (row < at.rows && at.column + i < parameters.columns) values[row][i] = data[i];
      }
      data += parameters.row_stride;
    }
  }
}

// The place of a group in its tile, which is 1 << width_shift groups wide. The two groups of a warp are below each
// other.
struct GroupPosition {
  int row;  // in groups
  int column;

  __device__ __forceinline__ static GroupPosition of(int group, int width_shift) {
    return {group >> (width_shift + 1) << 1 | (group & 1), group >> 1 & ((1 << width_shift) - 1)};
  }
  __device__ __forceinline__ int group(int width_shift) const {
    return row >> 1 << (width_shift + 1) | column << 1 | (row & 1);
  }
};
constexpr int kSharingGroups = kSharedScaleRows / kRows;

// Replaces the largest magnitudes of a group's rows by the largest of all rows that share its scale. Groups exchange
// values through `of_groups` in shared memory. Two buffers alternate, so that one barrier for each tile is enough: a
// slow warp may still read the last tile's values while other warps write this tile's. All threads of the block call
// it.
__device__ __forceinline__ void share_largest(uint32_t (&largest)[kRows], int width_shift, uint32_t* of_groups) {
  int const group = static_cast<int>(threadIdx.x) / kGroupLanes;
  if (threadIdx.x % kGroupLanes == 0) of_groups[group] = largest_of_all(largest);
  __syncthreads();
  GroupPosition at = GroupPosition::of(group, width_shift);
  uint32_t of_all = 0;
  at.row = at.row / kSharingGroups * kSharingGroups;
  CUTFUSE_UNROLL
  for (int i = 0; i < kSharingGroups; ++i, ++at.row) of_all = max(of_all, of_groups[at.group(width_shift)]);
  set_all(largest, of_all);
}

// Rows past the last of the matrix have scale 1.
__device__ __forceinline__ void store_scales(SplitParameters const& parameters, RowsPosition const& at,
                                             ThreadScales const& scales) {
  int64_t const first = static_cast<int64_t>(at.column / kSplitBlock) * parameters.scale_pitch;
  if (parameters.shares_scales) {
    if (at.row % kSharedScaleRows != 0) return;
    parameters.planes.scales[first + at.row / kSharedScaleRows] = at.rows > 0 ? scales[0] : 1.0f;
    return;
  }
  float4 vector;
  vector.x = at.rows > 0 ? scales[0] : 1.0f;
  vector.y = at.rows > 1 ? scales[1] : 1.0f;
  vector.z = at.rows > 2 ? scales[2] : 1.0f;
  vector.w = at.rows > 3 ? scales[3] : 1.0f;
  *reinterpret_cast<float4*>(parameters.planes.scales + first + at.row) = vector;
}

template <SplitScheme scheme>
__device__ __forceinline__ void split_values(SplitParameters const& parameters, RowsPosition const& at,
                                             ThreadValues& values, SplitFindings& findings, uint32_t* of_groups) {
  bool const inside = at.column < parameters.pitch;
  uint16_t* const high = first_part(parameters, at.row, at.column);
  ThreadScales scales;
  scale_blocks<scheme>(values, scales, findings, parameters.shares_scales,
                       [&](uint32_t (&largest)[kRows]) { share_largest(largest, parameters.width_shift, of_groups); });
  CUTFUSE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    if (inside && row < at.rows) store_parts<scheme>(values[row], high + row * kSplitBlock, parameters.plane_stride);
  }
  if (inside && threadIdx.x % kGroupLanes == 0) store_scales(parameters, at, scales);
}

template <SplitScheme scheme, bool vectors>
__global__ void __launch_bounds__(kBlockThreads, 4) split_rows(__grid_constant__ SplitParameters const parameters) {
  __shared__ uint32_t of_groups[2][kSplitGroups];  // tiles alternate between them
  if (!begin_pass(parameters)) return;
  int const lane = static_cast<int>(threadIdx.x) % kGroupLanes;
  int const width = 1 << parameters.width_shift;
  GroupPosition const in_tile = GroupPosition::of(static_cast<int>(threadIdx.x) / kGroupLanes, parameters.width_shift);
  int const row_in_tile = in_tile.row * kRows;
  int const column_in_tile = in_tile.column * kSplitBlock + lane * kLaneElements;
  int const tile_rows = (kSplitGroups >> parameters.width_shift) * kRows;
  int const tile_columns = width * kSplitBlock;
  int const count = parameters.row_tiles * parameters.column_tiles;
  SplitFindings findings;
  int elements = 0;
  int turn = 0;
  CUTFUSE_NO_UNROLL
  for (int tile = static_cast<int>(blockIdx.x); tile < count; tile += static_cast<int>(gridDim.x)) {
    int const row_tile = tile / parameters.column_tiles;
    int const first_row = row_tile * tile_rows;
    int const first_column = (tile - row_tile * parameters.column_tiles) * tile_columns;
    elements += extent_within(first_row, tile_rows, parameters.rows) *
                extent_within(first_column, tile_columns, parameters.columns);
    RowsPosition at = {first_row + row_in_tile, first_column + column_in_tile, 0};
    at.rows = extent_within(at.row, kRows, parameters.rows);
    ThreadValues values;
    load_rows<vectors>(parameters, at, values);
    split_values<scheme>(parameters, at, values, findings, of_groups[turn]);
    turn ^= 1;
  }
  write_flags(findings, elements, parameters.planes.flags);
}

bool has_aligned_rows(SplitParameters const& parameters) {
  bool const strides = parameters.rows <= 1 || parameters.row_stride % kLaneElements == 0;
  return strides && parameters.columns % kLaneElements == 0 &&
         reinterpret_cast<uintptr_t>(parameters.source) % kVectorBytes == 0;
}

template <SplitScheme scheme>
cudaError_t launch_scheme(SplitParameters const& parameters, cudaStream_t stream) {
  auto* const kernel = has_aligned_rows(parameters) ? &split_rows<scheme, true> : &split_rows<scheme, false>;
  return launch(kernel, parameters.blocks, kBlockThreads, stream, parameters);
}

constexpr int64_t kLongest =
    INT_MAX - 2048;  // limit of rows, columns and tiles: adding one tile to them still fits 32 bits

}  // namespace

cudaError_t launch_split_rows(SplitParameters const& parameters, cudaStream_t stream) {
  return parameters.scheme == SplitScheme::kSplit3 ? launch_scheme<SplitScheme::kSplit3>(parameters, stream)
                                                   : launch_scheme<SplitScheme::kSplit6>(parameters, stream);
}

cudaError_t run_split(SplitProblem const& problem, cudaStream_t stream) {
  bool const transposed = problem.column_stride != 1;
  PlanesShape const shape = planes_shape(problem.rows, problem.columns, problem.scheme, transposed, problem.is_weight);
  SplitTiles const tiles = split_tiles(problem.rows, problem.columns, transposed);
  if (problem.rows > kLongest || problem.columns > kLongest) return cudaErrorInvalidValue;
  if (tiles.row_tiles * tiles.column_tiles > kLongest) return cudaErrorInvalidValue;
  SplitParameters parameters = {};
  parameters.source = problem.source;
  parameters.row_stride = problem.row_stride;
  parameters.column_stride = problem.column_stride;
  parameters.plane_stride = shape.rows * kSplitBlock;
  parameters.block_stride = plane_count(problem.scheme) * parameters.plane_stride;
  parameters.planes = problem.planes;
  parameters.cleared = problem.cleared;
  parameters.only_if = problem.only_if;
  parameters.rows = static_cast<int32_t>(shape.rows);
  parameters.columns = static_cast<int32_t>(shape.columns);
  parameters.pitch = static_cast<int32_t>(shape.pitch);
  parameters.scale_pitch = static_cast<int32_t>(shape.scale_pitch);
  parameters.shares_scales = scale_rows(problem.scheme, problem.is_weight) > 1;
  parameters.row_tiles = static_cast<int32_t>(tiles.row_tiles);
  parameters.column_tiles = static_cast<int32_t>(tiles.column_tiles);
  parameters.width_shift = tiles.width_shift;
  parameters.blocks = static_cast<int32_t>(tiles.blocks);
  parameters.scheme = problem.scheme;
  parameters.guarded = problem.guarded;
  return transposed ? launch_split_transposed(parameters, stream) : launch_split_rows(parameters, stream);
}

}  // namespace cutfuse
