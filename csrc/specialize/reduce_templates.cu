// The kernels that programs before a reduction of rows are compiled into, where rows are whole aligned vectors. As
// pointwise_templates.cu, and the same bits as row_reduce_program: the same elements of a thread in the same order, the
// same folds, and the same combination of threads.
#include <cstddef>

#include "reduce/block_combine.h"
#include "reduce/kernels.h"
#include "reduce/store_result.h"

namespace cutfuse {
namespace {

// Vectors that a thread has under way: 64 KB a multiprocessor in four blocks. An H200 needs some 40 KB to read at its
// full rate.
constexpr int kPieces = 4;
constexpr int kBlocks = 4;

template <class T>
__device__ __forceinline__ void mark_layout() {
  asm volatile("cutfuse.layout %0, %1, %2, %3, 0;" ::"n"(offsetof(ReduceProgramParameters, program)),
               "n"(offsetof(ReduceProgramParameters, operands)), "n"(kVectorSize<T>), "n"(kPieces));
}

// Says where the thread's line through the operands begins, which lies along the reduced dimension.
__device__ __forceinline__ void mark_locate(int64_t outer, int64_t row, int64_t inner) {
  asm volatile("cutfuse.locate %0, %1, %2, %3;" ::"l"(outer), "l"(row), "l"(inner), "n"(1));
}

// Has the operands of a piece loaded, so many elements along the line, if there is such a piece.
template <int piece>
__device__ __forceinline__ void mark_fetch(uint32_t offset, bool exists) {
  asm volatile("cutfuse.fetch %2, %0, %1;" ::"r"(offset), "r"(static_cast<int>(exists)), "n"(piece));
}

template <int piece>
__device__ __forceinline__ void mark_compute(float* values, TypeTag<float>) {
  asm volatile("cutfuse.compute %4, {%0, %1, %2, %3};"
               : "+f"(values[0]), "+f"(values[1]), "+f"(values[2]), "+f"(values[3])
               : "n"(piece));
}

template <int piece, class T>
__device__ __forceinline__ void mark_compute(float* values, TypeTag<T>) {
  asm volatile("cutfuse.compute %8, {%0, %1, %2, %3, %4, %5, %6, %7};"
               : "+f"(values[0]), "+f"(values[1]), "+f"(values[2]), "+f"(values[3]), "+f"(values[4]), "+f"(values[5]),
                 "+f"(values[6]), "+f"(values[7])
               : "n"(piece));
}

// A statement, as the marks are, so that it stays where it stands among them.
template <class T>
__device__ __forceinline__ void load_if(bool exists, T const* data, Vector<T>& vector) {
  asm volatile(
      "{\n"
      ".reg .pred exists;\n"
      "setp.ne.s32 exists, %5, 0;\n"
      "@exists ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(vector.words[0]), "+r"(vector.words[1]), "+r"(vector.words[2]), "+r"(vector.words[3])
      : "l"(__cvta_generic_to_global(data)), "r"(static_cast<int>(exists)));
}

// A thread's line through a row: pieces of one vector, `step` elements apart.
template <Reduction reduction, class T>
struct Line {
  static constexpr int kSize = kVectorSize<T>;
  static constexpr int kFragmentPieces = kRowFragment / kSize;
  static_assert(kPieces % kFragmentPieces == 0, "a thread has whole fragments under way");

  StaticOperations<reduction> operations;
  T const* data;
  // Unsigned, so that nvcc does not keep the address of each piece in two registers.
  uint32_t step;
  uint32_t offset = 0;
  int left;  // pieces from the first one on that is under way
  Vector<T> pieces[kPieces] = {};

  template <int piece>
  __device__ __forceinline__ void fetch() {
    uint32_t const place = offset + piece * step;
    load_if(piece < left, data + place, pieces[piece]);
    mark_fetch<piece>(place, piece < left);
  }

  template <int piece>
  __device__ __forceinline__ void begin() {
    if constexpr (piece < kPieces) {
      fetch<piece>();
      begin<piece + 1>();
    }
  }

  // A piece of a fragment, and then its successor's load: kPieces - 1 others are under way while it is computed.
  template <int piece>
  __device__ __forceinline__ void compute(float (&values)[kRowFragment]) {
    float* const target = values + piece % kFragmentPieces * kSize;
    unpack(pieces[piece], target);
    mark_compute<piece>(target, TypeTag<T>{});
    fetch<piece>();
    if constexpr ((piece + 1) % kFragmentPieces != 0) compute<piece + 1>(values);
  }

  template <int piece>
  __device__ __forceinline__ void take(RowState& state, int existing) {
    float values[kRowFragment];
    compute<piece>(values);
    // A loop, which ptxas does not turn into selects in every fragment's way.
    CUTFUSE_NO_UNROLL
    for (int missing = existing; missing < piece + kFragmentPieces; ++missing) {
      CUTFUSE_UNROLL
      for (int i = 0; i < kRowFragment; ++i) {
        if (piece + i / kSize == missing) values[i] = operations.fill();
      }
    }
    operations.template take<kRowFragment>(state, values);
    constexpr int kNext = piece + kFragmentPieces;
    if constexpr (kNext < kPieces) {
      if (kNext < existing) take<kNext>(state, existing);
    }
  }

  __device__ __forceinline__ void take_all(RowState& state) {
    begin<0>();
    CUTFUSE_NO_UNROLL
    while (left > 0) {
      int const existing = left;
      left -= kPieces;
      offset += kPieces * step;
      take<0>(state, existing);
    }
  }
};

template <Reduction reduction, class T>
__device__ __forceinline__ void run(ReduceProgramParameters const& parameters) {
  mark_layout<T>();
  ReduceParameters const& reduce = parameters.reduce;
  ReduceExtents const& extents = reduce.extents;
  ReducePlan const& plan = reduce.plan;
  StaticOperations<reduction> const operations;
  RowTask const task = row_task(plan);
  int64_t const result = task.row < extents.outer * extents.inner ? task.row : -1;
  RowState state = operations.initial();
  if (result >= 0) {
    int64_t const begin = task.split * plan.chunk + task.lane * kVectorSize<T>;
    int64_t const rest = extents.reduced - task.split * plan.chunk;
    int const vectors = static_cast<int>(rest < plan.chunk ? rest : plan.chunk) / kVectorSize<T>;
    int64_t const outer = extents.inner == 1 ? task.row : task.row / extents.inner;
    int64_t const inner = task.row - outer * extents.inner;
    mark_locate(outer, begin, inner);
    T const* const data = static_cast<T const*>(reduce.x.data) + outer * reduce.x.strides[0] +
                          inner * reduce.x.strides[2] + begin;
    int const shift = __popc(plan.lanes - 1);
    int const left = (vectors - task.lane + plan.lanes - 1) >> shift;
    Line<reduction, T> line = {operations, data, static_cast<uint32_t>(plan.lanes * kVectorSize<T>), 0, left};
    line.take_all(state);
  }
  state = combine_threads(operations, state, plan.lanes);
  if (result >= 0 && task.lane == 0) store_result(reduce, task.split, result, state);
}

}  // namespace
}  // namespace cutfuse

#define CUTFUSE_TEMPLATE(Camel, name, type, T)                                                       \
  extern "C" __global__ void __launch_bounds__(cutfuse::kBlockThreads, cutfuse::kBlocks)             \
      row_reduce_##name##_##type(__grid_constant__ cutfuse::ReduceProgramParameters const problem) { \
    cutfuse::run<cutfuse::Reduction::k##Camel, T>(problem);                                          \
  }

#define CUTFUSE_TEMPLATES(Camel, name)                    \
  CUTFUSE_TEMPLATE(Camel, name, float32, float)           \
  CUTFUSE_TEMPLATE(Camel, name, float16, __half)          \
  CUTFUSE_TEMPLATE(Camel, name, bfloat16, __nv_bfloat16)

// One for each fold, by the name of its first reduction: until finish a mean is a sum.
CUTFUSE_TEMPLATES(Sum, sum)
#define CUTFUSE_ADDITIVE_REDUCTION(...)
#define CUTFUSE_REDUCTION(Camel, name, ...) CUTFUSE_TEMPLATES(Camel, name)
#include "reduce/reductions.def"
