// Splits contiguous rows. A group of sixteen lanes takes a block of 64 columns in four rows: four 16-byte loads of a
// thread are in flight, with eight they do not fit beside the rest in 64 registers and are issued one after another.
// The two groups of a warp lie one below the other, so that it writes whole sectors of scales.
#include "common/vector_access.h"
#include "split/kernels.h"
#include "split/split_block.h"

namespace cutfuse {
namespace {

constexpr int kRows = kSplitGroupRows;
static_assert(kRows == kThreadRows && kBlockThreads == kSplitGroups * kGroupLanes, "as the tiles are planned");

// Where a thread's elements begin, and how many of its rows exist.
struct RowsPosition {
  int row;
  int column;
  int rows;
};

// vectors: all rows are aligned, and whole vectors long.
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

// 1 past the last row of the matrix.
__device__ __forceinline__ void store_scales(SplitParameters const& parameters, RowsPosition const& at,
                                             ThreadScales const& scales) {
  float4 vector;
  vector.x = at.rows > 0 ? scales[0] : 1.0f;
  vector.y = at.rows > 1 ? scales[1] : 1.0f;
  vector.z = at.rows > 2 ? scales[2] : 1.0f;
  vector.w = at.rows > 3 ? scales[3] : 1.0f;
  int64_t const index = static_cast<int64_t>(at.column / kSplitBlock) * parameters.scale_pitch + at.row;
  *reinterpret_cast<float4*>(parameters.planes.scales + index) = vector;
}

template <SplitPlan plan>
__device__ __forceinline__ void split_values(SplitParameters const& parameters, RowsPosition const& at,
                                             ThreadValues& values, SplitFindings& findings) {
  bool const inside = at.column < parameters.pitch;
  uint16_t* const high = first_part(parameters, at.row, at.column);
  ThreadScales scales;
  scale_blocks<plan>(values, scales, findings);
  CUTFUSE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    if (inside && row < at.rows) store_parts<plan>(values[row], high + row * kSplitBlock, parameters.plane_stride);
  }
  if (inside && threadIdx.x % kGroupLanes == 0) store_scales(parameters, at, scales);
}

template <SplitPlan plan, bool vectors>
__global__ void __launch_bounds__(kBlockThreads, 4) split_rows(__grid_constant__ SplitParameters const parameters) {
  if (!begin_pass(parameters)) return;
  int const group = static_cast<int>(threadIdx.x) / kGroupLanes;
  int const lane = static_cast<int>(threadIdx.x) % kGroupLanes;
  int const width = 1 << parameters.width_shift;
  int const row_in_tile = (group >> (parameters.width_shift + 1) << 1 | (group & 1)) * kRows;
  int const column_in_tile = (group >> 1 & (width - 1)) * kSplitBlock + lane * kLaneElements;
  int const tile_rows = (kSplitGroups >> parameters.width_shift) * kRows;
  int const tile_columns = width * kSplitBlock;
  int const count = parameters.row_tiles * parameters.column_tiles;
  SplitFindings findings;
  int elements = 0;
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
    split_values<plan>(parameters, at, values, findings);
  }
  write_flags(findings, elements, parameters.planes.flags);
}

bool has_aligned_rows(SplitParameters const& parameters) {
  bool const strides = parameters.rows <= 1 || parameters.row_stride % kLaneElements == 0;
  return strides && parameters.columns % kLaneElements == 0 &&
         reinterpret_cast<uintptr_t>(parameters.source) % kVectorBytes == 0;
}

template <SplitPlan plan>
cudaError_t launch_plan(SplitParameters const& parameters, cudaStream_t stream) {
  auto* const kernel = has_aligned_rows(parameters) ? &split_rows<plan, true> : &split_rows<plan, false>;
  return launch_pass(kernel, parameters, stream);
}

}  // namespace

cudaError_t launch_split_rows(SplitParameters const& parameters, cudaStream_t stream) {
  return parameters.plan == SplitPlan::kSplit3 ? launch_plan<SplitPlan::kSplit3>(parameters, stream)
                                               : launch_plan<SplitPlan::kSplit6>(parameters, stream);
}

}  // namespace cutfuse
