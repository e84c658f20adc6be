// Reduces a dimension that is not the innermost. Threads lie along the inner dimension and, where it is narrow, along
// the reduced one too; each keeps a state per element of its vector. ReducePlan says how super-rows allow 16-byte loads
// of rows of any length and alignment.
#include "reduce/combine.h"
#include "reduce/kernels.h"

namespace cutfuse {
namespace {

// Loads in flight: 64 bytes a thread at least, except for single 16-bit elements. More would cost registers that eight
// states of 16-bit elements need.
constexpr int unroll_of(int vector) { return vector == 1 ? 16 : 32 / vector; }

template <class T, int vector>
struct Elements {
  Vector<T, vector> loaded;
};

// One element, where rows are neither contiguous nor aligned.
template <class T>
struct Elements<T, 1> {
  T loaded;
};

template <class T, int vector>
__device__ __forceinline__ Elements<T, vector> all_elements(float value) {
  Elements<T, vector> elements;
  if constexpr (vector == 1) {
    store_element(&elements.loaded, value);
  } else {
    float values[vector];
    CUTFUSE_UNROLL
    for (int j = 0; j < vector; ++j) values[j] = value;
    pack(values, elements.loaded);
  }
  return elements;
}

template <class T, int vector>
__device__ __forceinline__ Elements<T, vector> load_elements(T const* data) {
  if constexpr (vector == 1) {
    return {*data};
  } else {
    return {load_vector<T, vector>(data)};
  }
}

// Element j of each of a thread's loads, converted as it is used.
template <class T, int vector>
struct Column {
  Elements<T, vector> const* elements;
  int j;

  __device__ __forceinline__ float operator[](int u) const {
    if constexpr (vector == 1) {
      return to_float(elements[u].loaded);
    } else {
      return element(elements[u].loaded, j);
    }
  }
};

template <class Operations, class T, int vector>
struct ThreadStates {
  static constexpr int kUnroll = unroll_of(vector);
  Operations operations;
  RowState states[vector];

  __device__ __forceinline__ void take_loaded(Elements<T, vector> const* loaded) {
    CUTFUSE_UNROLL
    for (int j = 0; j < vector; ++j) operations.template take<kUnroll>(states[j], Column<T, vector>{loaded, j});
  }

  // Takes `count` super-rows in, `step` elements apart.
  __device__ __forceinline__ void take(T const* data, int64_t step, int64_t count) {
    Elements<T, vector> loaded[kUnroll];
    CUTFUSE_NO_UNROLL
    for (; count >= kUnroll; count -= kUnroll, data += kUnroll * step) {
      CUTFUSE_UNROLL
      for (int u = 0; u < kUnroll; ++u) loaded[u] = load_elements<T, vector>(data + u * step);
      take_loaded(loaded);
    }
    if (count <= 0) return;
    int const rest = static_cast<int>(count);
    CUTFUSE_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      loaded[u] = all_elements<T, vector>(operations.fill());
      if (u < rest) loaded[u] = load_elements<T, vector>(data + u * step);
    }
    take_loaded(loaded);
  }

  // Takes in the elements of a vector that lies only partly in [0, length) of the span.
  __device__ __forceinline__ void take_partial(T const* span, int64_t start, int64_t length) {
    CUTFUSE_UNROLL
    for (int j = 0; j < vector; ++j) {
      if (start + j >= 0 && start + j < length) {
        float const value[1] = {to_float(span[start + j])};
        operations.template take<1>(states[j], value);
      }
    }
  }
};

// Blocks per multiprocessor that leave room for the loads in flight without a spill.
constexpr int resident_blocks(Reduction reduction) { return info_of(reduction).fold == Fold::kExponentials ? 2 : 4; }

template <class T, int vector, Reduction reduction>
__global__ void __launch_bounds__(kBlockThreads, resident_blocks(reduction))
    strided_reduce(__grid_constant__ ReduceParameters const parameters) {
  begin_behind_previous_kernel();
  ReduceExtents const& extents = parameters.extents;
  ReducePlan const& plan = parameters.plan;
  BlockPosition const position = block_position(extents, plan);
  T const* const slice = static_cast<T const*>(parameters.x.data) + position.outer * parameters.x.strides[0];
  bool const contiguous = vector > 1 && parameters.x.strides[1] == extents.inner;
  int const past_boundary =
      contiguous ? static_cast<int>(reinterpret_cast<uintptr_t>(slice) % kVectorBytes / sizeof(T)) : 0;
  StridedThread thread = strided_thread(extents, plan, position.column, past_boundary);
  if (!contiguous) thread.full_end = extents.reduced;

  ThreadStates<StaticOperations<reduction>, T, vector> local;
  CUTFUSE_UNROLL
  for (int j = 0; j < vector; ++j) local.states[j] = local.operations.initial();
  if (position.active) {
    int64_t const split_begin = position.split * plan.chunk;
    int64_t const split_end = position.split == plan.splits - 1 ? INT64_MAX : split_begin + plan.chunk;
    int64_t const begin = split_begin > thread.full_begin ? split_begin : thread.full_begin;
    int64_t const end = split_end < thread.full_end ? split_end : thread.full_end;
    int64_t const pitch = plan.rows_per_super_row * parameters.x.strides[1];
    int64_t const start = vector == 1 ? thread.start * parameters.x.strides[2] : thread.start;
    int64_t const count = end - begin - position.y;
    local.take(slice + start + (begin + position.y) * pitch, plan.height * pitch,
               count <= 0 ? 0 : (count + plan.height - 1) / plan.height);
    if (contiguous && position.y == 0) {
      if (thread.start < 0 && split_begin == 0) local.take_partial(slice, thread.start, thread.length);
      int64_t const last = thread.full_end > thread.full_begin ? thread.full_end : thread.full_begin;
      if (split_begin <= last && last < split_end) {
        local.take_partial(slice, thread.start + last * thread.super_row, thread.length);
      }
    }
  }
  combine_columns<vector>(local.operations, local.states, parameters, position, thread);
}

template <class T, int vector>
cudaError_t launch_for(ReduceParameters const& parameters, cudaStream_t stream) {
  return dispatch_fold(parameters.reduction, [&](auto constant) {
    return launch(strided_reduce<T, vector, decltype(constant)::value>, block_count(parameters),
                  threads_of(parameters.plan), stream, parameters);
  });
}

}  // namespace

cudaError_t launch_strided_reduce(ReduceParameters const& parameters, cudaStream_t stream) {
  return dispatch_dtype(parameters.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return parameters.plan.vector == 1 ? launch_for<T, 1>(parameters, stream)
                                       : launch_for<T, kVectorSize<T>>(parameters, stream);
  });
}

}  // namespace cutfuse
