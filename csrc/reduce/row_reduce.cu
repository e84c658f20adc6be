// Reduces contiguous rows: a power of two of threads per row, 16-byte loads, four in flight per thread. A row may start
// at any element: what precedes its first 16-byte boundary and follows its last one is read singly. weighted_row_sum is
// the product of a matrix and a vector.
#include "reduce/combine.h"
#include "reduce/kernels.h"

namespace cutfuse {
namespace {

constexpr int kUnroll = 4;

template <class Operations, class T, bool weighted>
struct RowReader {
  static constexpr int kSize = kVectorSize<T>;
  Operations operations;
  T const* data;
  float const* weight;  // of the first element

  __device__ __forceinline__ void apply_weight(int vector, float* values) const {
    CUTFUSE_UNROLL
    for (int i = 0; i < kSize; i += 4) {
      float weights[4];
      unpack(load_vector(weight + vector * kSize + i), weights);
      CUTFUSE_UNROLL
      for (int j = 0; j < 4; ++j) values[i + j] *= weights[j];
    }
  }

  __device__ __forceinline__ void take_vectors(RowState& state, int head, int vectors, int lane, int lanes) const {
    float fill[kSize];
    CUTFUSE_UNROLL
    for (int i = 0; i < kSize; ++i) fill[i] = operations.fill();
    CUTFUSE_NO_UNROLL
    for (int first = lane; first < vectors; first += lanes * kUnroll) {
      Vector<T> loaded[kUnroll];
      CUTFUSE_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        int const vector = first + u * lanes;
        pack(fill, loaded[u]);
        if (vector < vectors) loaded[u] = load_vector(data + head + vector * kSize);
      }
      float values[kUnroll * kSize];
      CUTFUSE_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        unpack(loaded[u], values + u * kSize);
        if (weighted && first + u * lanes < vectors) apply_weight(first + u * lanes, values + u * kSize);
      }
      operations.template take<kUnroll * kSize>(state, values);
    }
  }

  __device__ __forceinline__ void take(RowState& state, int count, int lane, int lanes) const {
    int const to_boundary = elements_to_boundary(data);
    int const head = to_boundary < count ? to_boundary : count;
    int const vectors = (count - head) / kSize;
    take_vectors(state, head, vectors, lane, lanes);
    int const middle = vectors * kSize;
    CUTFUSE_NO_UNROLL
    for (int i = lane; i < count - middle; i += lanes) {
      int const index = i < head ? i : i + middle;
      float const value[1] = {to_float(data[index]) * (weighted ? weight[index] : 1.0f)};
      operations.template take<1>(state, value);
    }
  }
};

template <class T, Reduction reduction, bool weighted>
__device__ __forceinline__ void reduce_row(ReduceParameters const& parameters) {
  begin_behind_previous_kernel();
  StaticOperations<reduction> const operations;
  ReduceExtents const& extents = parameters.extents;
  ReducePlan const& plan = parameters.plan;
  RowTask const task = row_task(plan);
  bool const active = task.row < extents.outer * extents.inner;
  RowState state = operations.initial();
  if (active) {
    int64_t const outer = extents.inner == 1 ? task.row : task.row / extents.inner;
    int64_t const inner = task.row - outer * extents.inner;
    int64_t const begin = task.split * plan.chunk;
    int64_t const rest = extents.reduced - begin;
    int const count = static_cast<int>(rest < plan.chunk ? rest : plan.chunk);
    T const* const data = static_cast<T const*>(parameters.x.data) + outer * parameters.x.strides[0] +
                          inner * parameters.x.strides[2] + begin;
    RowReader<StaticOperations<reduction>, T, weighted> const reader = {operations, data,
                                                                        weighted ? parameters.weight + begin : nullptr};
    reader.take(state, count, task.lane, plan.lanes);
  }
  state = combine_threads(operations, state, plan.lanes);
  if (active && task.lane == 0) store_result(parameters, task.split, task.row, state);
}

template <class T, Reduction reduction>
__global__ void __launch_bounds__(kBlockThreads) row_reduce(__grid_constant__ ReduceParameters const parameters) {
  reduce_row<T, reduction, false>(parameters);
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads) weighted_row_sum(__grid_constant__ ReduceParameters const parameters) {
  reduce_row<T, Reduction::kSum, true>(parameters);
}

}  // namespace

cudaError_t launch_row_reduce(ReduceParameters const& parameters, cudaStream_t stream) {
  return dispatch_dtype(parameters.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_fold(parameters.reduction, [&](auto constant) {
      return launch(row_reduce<T, decltype(constant)::value>, block_count(parameters), kBlockThreads, stream,
                    parameters);
    });
  });
}

cudaError_t launch_weighted_row_sum(ReduceParameters const& parameters, cudaStream_t stream) {
  return dispatch_dtype(parameters.x.dtype, [&](auto tag) {
    return launch(weighted_row_sum<typename decltype(tag)::type>, block_count(parameters), kBlockThreads, stream,
                  parameters);
  });
}

}  // namespace cutfuse
