#include "split/split.h"

#include <climits>

#include "split/kernels.h"

namespace cutfuse {

namespace {

constexpr int64_t kLongest =
    INT_MAX - 2048;  // limit of rows, columns and tiles: adding one tile to them still fits 32 bits

}  // namespace

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
