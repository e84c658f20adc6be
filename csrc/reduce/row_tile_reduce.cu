// Reduces short contiguous rows that are not 16-byte aligned, such as 33 bf16: a block loads as many whole rows as fit
// in 16 KB with aligned 16-byte loads and reduces them out of shared memory.
#include "reduce/combine.h"
#include "reduce/kernels.h"

namespace cutfuse {
namespace {

constexpr int kTileBytes = 16384;
constexpr int kLoads = kTileBytes / (kVectorBytes * kBlockThreads);
constexpr int kFragment = 8;

// Copies `count` elements to a tile that lies as far past a boundary as they do.
template <class T>
__device__ __forceinline__ void load_tile(T* tile, T const* data, int count) {
  constexpr int kSize = kVectorSize<T>;
  int const to_boundary = elements_to_boundary(data);
  int const head = to_boundary < count ? to_boundary : count;
  int const vectors = (count - head) / kSize;
  int const thread = static_cast<int>(threadIdx.x);
  Vector<T> loaded[kLoads];
  CUTFUSE_UNROLL
  for (int u = 0; u < kLoads; ++u) {
    int const vector = thread + u * kBlockThreads;
    if (vector < vectors) loaded[u] = load_vector(data + head + vector * kSize);
  }
  CUTFUSE_UNROLL
  for (int u = 0; u < kLoads; ++u) {
    int const vector = thread + u * kBlockThreads;
    if (vector < vectors) store_vector(tile + head + vector * kSize, loaded[u]);
  }
  int const ends = count - vectors * kSize;
  if (thread < ends) {
    int const i = thread < head ? thread : thread + vectors * kSize;
    tile[i] = data[i];
  }
}

template <class T, Reduction reduction>
__global__ void __launch_bounds__(kBlockThreads) row_tile_reduce(__grid_constant__ ReduceParameters const parameters) {
  __shared__ uint4 storage[kTileBytes / kVectorBytes + 1];
  begin_behind_previous_kernel();
  StaticOperations<reduction> const operations;
  ReducePlan const& plan = parameters.plan;
  int const length = static_cast<int>(parameters.extents.reduced);
  int64_t const rows = parameters.extents.outer;
  int64_t const first_row = blockIdx.x * static_cast<int64_t>(plan.tile_rows);
  int const tile_rows = static_cast<int>(rows - first_row < plan.tile_rows ? rows - first_row : plan.tile_rows);
  T const* const data = static_cast<T const*>(parameters.x.data) + first_row * length;
  int const past_boundary = (kVectorSize<T> - elements_to_boundary(data)) % kVectorSize<T>;
  T* const tile = reinterpret_cast<T*>(storage) + past_boundary;
  load_tile(tile, data, tile_rows * length);
  __syncthreads();
  int const lanes = plan.lanes;
  int const lane = static_cast<int>(threadIdx.x) % lanes;
  for (int base = 0; base < tile_rows; base += kBlockThreads / lanes) {  // the same trips for a whole warp
    int const row = base + static_cast<int>(threadIdx.x) / lanes;
    RowState state = operations.initial();
    if (row < tile_rows) {
      T const* const values = tile + row * length;
      int column = lane;
      CUTFUSE_NO_UNROLL
      for (; column + (kFragment - 1) * lanes < length; column += kFragment * lanes) {
        float fragment[kFragment];
        CUTFUSE_UNROLL
        for (int i = 0; i < kFragment; ++i) fragment[i] = to_float(values[column + i * lanes]);
        operations.template take<kFragment>(state, fragment);
      }
      CUTFUSE_NO_UNROLL
      for (; column < length; column += lanes) {
        float const value[1] = {to_float(values[column])};
        operations.template take<1>(state, value);
      }
    }
    state = combine_lanes(operations, state, lanes);
    if (row < tile_rows && lane == 0) store_result(parameters, 0, first_row + row, state);
  }
}

template <class T>
cudaError_t launch_for(ReduceParameters const& parameters, cudaStream_t stream) {
  int64_t const blocks = ceil_divide(parameters.extents.outer, parameters.plan.tile_rows);
  return dispatch_fold(parameters.reduction, [&](auto constant) {
    return launch(row_tile_reduce<T, decltype(constant)::value>, blocks, kBlockThreads, stream, parameters);
  });
}

}  // namespace

cudaError_t launch_row_tile_reduce(ReduceParameters const& parameters, cudaStream_t stream) {
  return dispatch_dtype(parameters.x.dtype,
                        [&](auto tag) { return launch_for<typename decltype(tag)::type>(parameters, stream); });
}

}  // namespace cutfuse
