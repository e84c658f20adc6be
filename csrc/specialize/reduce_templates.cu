// The kernels that programs before a reduction are compiled into: row_reduce_* of rows, and strided_reduce_* of
// columns, where rows are whole aligned vectors. As pointwise_templates.cu, and with the bits of row_reduce_program and
// strided_reduce_program: the same elements of a thread in the same order, the same folds, and the same combination of
// threads.
#include <cstddef>

#include "reduce/combine.h"
#include "reduce/kernels.h"
#include "specialize/template_marks.h"

namespace cutfuse {
namespace {

// Bytes of x that a thread has under way. An H200 needs some 40 KB a multiprocessor to read at its full rate: three
// blocks have 48 KB, and four 64 KB.
constexpr int kBytesInFlight = 64;
constexpr int kRowBlocks = 4;
constexpr int kColumnBlocks = 3;  // eight states of a thread are 16 registers

// Registers beside a program's: those of the pieces and a fragment's values among them.
constexpr int kRowRegisters = 48;
constexpr int kColumnRegisters = 76;
constexpr int kExponentialRegisters = 16;  // more of columns: all rows of a fragment wait for their maximum

template <int elements, int pieces, int registers>
__device__ __forceinline__ void mark_layout() {
  asm volatile("cutfuse.layout %0, %1, %2, %3, 0, %4;" ::"n"(offsetof(ReduceProgramParameters, program)),
               "n"(offsetof(ReduceProgramParameters, operands)), "n"(elements), "n"(pieces), "n"(registers));
}

// Says where the thread's first piece begins, and how far the next one is: `step` along the reduced dimension. The
// elements of a piece lie along dimension `along`.
template <int along>
__device__ __forceinline__ void mark_locate(int64_t outer, int64_t row, int64_t inner, int step) {
  asm volatile("cutfuse.locate %0, %1, %2, %4, 1, %3;" ::"l"(outer), "l"(row), "l"(inner), "r"(step), "n"(along));
}

// Has the operands of the next piece loaded, if there is one.
template <int piece>
__device__ __forceinline__ void mark_fetch(bool exists) {
  asm volatile("cutfuse.fetch %1, %0;" ::"r"(static_cast<int>(exists)), "n"(piece));
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

// A number that nvcc knows nothing of. A branch between two fragments, which is always taken, keeps ptxas from putting
// off the loads of the first one to the end of the second, behind which their values are needed at once.
__device__ __forceinline__ int unknown(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// A thread's pieces of so many elements, `step` apart, in fragments of so many pieces. It computes a part of a fragment
// at a time, whose values wait for each other.
template <class T, int elements, int fragment, int part = fragment>
struct Line {
  static constexpr int kSize = kVectorSize<T>;
  static constexpr int kVectors = elements / kSize;
  static constexpr int kPieces = kBytesInFlight / (kVectors * kVectorBytes);
  static constexpr int kStep = kPieces > fragment ? kPieces : fragment;  // pieces between two tests for the end
  static_assert(kStep % kPieces == 0 && kStep % fragment == 0 && fragment % part == 0, "a step is of whole fragments");

  T const* data;
  int64_t step;
  int rest;  // pieces from the step's first one on
  Vector<T> loaded[kPieces][kVectors] = {};

  template <int piece>
  __device__ __forceinline__ void fetch(bool exists) {
    CUTFUSE_UNROLL
    for (int k = 0; k < kVectors; ++k) load_if(exists, data + k * kSize, loaded[piece][k]);
    data += step;
    mark_fetch<piece>(exists);
  }

  template <int piece>
  __device__ __forceinline__ void begin() {
    if constexpr (piece < kPieces) {
      fetch<piece>(piece < rest);
      begin<piece + 1>();
    }
  }

  // Piece `index` of the step, and then the load of the one that takes its place: kPieces - 1 others are under way
  // while it is computed.
  template <int index, bool is_last>
  __device__ __forceinline__ void compute(float* values) {
    constexpr int kPiece = index % kPieces;
    CUTFUSE_UNROLL
    for (int k = 0; k < kVectors; ++k) unpack(loaded[kPiece][k], values + k * kSize);
    mark_compute<kPiece, elements>(values);
    if constexpr (!is_last || index + kPieces < kStep) fetch<kPiece>(index + kPieces < rest);
  }

  // The last step's pieces may be missing, each of which is a branch.
  template <int index, bool is_last>
  __device__ __forceinline__ void compute_part(float fill, float* values) {
    if (!is_last || index < rest) {
      compute<index, is_last>(values);
    } else {
      CUTFUSE_UNROLL
      for (int i = 0; i < elements; ++i) values[i] = fill;
    }
    if constexpr ((index + 1) % part != 0) compute_part<index + 1, is_last>(fill, values + elements);
  }

  template <int first, bool is_last, class Fold>
  __device__ __forceinline__ void take(float fill, Fold& fold) {
    float values[part * elements];
    compute_part<first, is_last>(fill, values);
    constexpr int kNext = first + part;
    fold.template take<first % fragment>(values);
    if constexpr (kNext < kStep) {
      if (kNext % fragment != 0 || kNext < (is_last ? rest : unknown(rest))) take<kNext, is_last>(fill, fold);
    }
  }

  // fold.take<k>(values) is given the part of a fragment that begins with its piece k. Whole steps, and the rest of
  // one, are two copies of the program: what pieces are missing is no part of the loop.
  template <class Fold>
  __device__ __forceinline__ void take_all(Fold& fold) {
    float const fill = fold.operations.fill();
    begin<0>();
    CUTFUSE_NO_UNROLL
    for (; rest >= kStep; rest -= kStep) take<0, false>(fill, fold);
    if (rest > 0) take<0, true>(fill, fold);
  }
};

template <Reduction reduction>
struct RowFold {
  StaticOperations<reduction> operations;
  RowState state = operations.initial();

  template <int>
  __device__ __forceinline__ void take(float const* values) {
    operations.template take<kRowFragment>(state, values);
  }
};

// What row_task says, in 32 bits, which reduce_plan.cpp sees to: a row times a stride of 64 bits is two instructions
// then, and four otherwise.
struct RowStart {
  uint32_t row;
  uint32_t split;
  int lane;
};

__device__ __forceinline__ RowStart row_start(ReducePlan const& plan) {
  int const shift = __popc(plan.lanes - 1);  // of a power of two
  uint32_t const task = blockIdx.x * (static_cast<uint32_t>(kBlockThreads) >> shift) + (threadIdx.x >> shift);
  uint32_t const splits = static_cast<uint32_t>(plan.splits);
  uint32_t const row = splits == 1 ? task : task / splits;
  return {row, task - row * splits, static_cast<int>(threadIdx.x) & (plan.lanes - 1)};
}

template <Reduction reduction, class T>
__device__ __forceinline__ void reduce_rows(ReduceProgramParameters const& parameters) {
  constexpr int kSize = kVectorSize<T>;
  using RowLine = Line<T, kSize, kRowFragment / kSize>;
  mark_layout<kSize, RowLine::kPieces, kRowRegisters>();
  ReduceParameters const& reduce = parameters.reduce;
  ReduceExtents const& extents = reduce.extents;
  ReducePlan const& plan = reduce.plan;
  RowFold<reduction> fold;
  RowStart const task = row_start(plan);
  uint32_t const inner_rows = static_cast<uint32_t>(extents.inner);
  bool const exists = task.row < static_cast<uint32_t>(extents.outer) * inner_rows;
  if (exists) {
    int64_t const chunk = task.split * plan.chunk;
    int64_t const room = extents.reduced - chunk;
    int const vectors = static_cast<int>(static_cast<uint32_t>(room < plan.chunk ? room : plan.chunk) / kSize);
    int64_t const begin = chunk + task.lane * kSize;
    uint32_t const outer = inner_rows == 1 ? task.row : task.row / inner_rows;
    uint32_t const inner = task.row - outer * inner_rows;
    int const step = plan.lanes * kSize;
    mark_locate<1>(outer, begin, inner, step);
    T const* const data =
        static_cast<T const*>(reduce.x.data) + outer * reduce.x.strides[0] + inner * reduce.x.strides[2] + begin;
    RowLine line = {data, step, (vectors - task.lane + plan.lanes - 1) >> __popc(plan.lanes - 1)};
    line.take_all(fold);
  }
  RowState const state = combine_threads(fold.operations, fold.state, plan.lanes);
  if (exists && task.lane == 0) store_result(reduce, task.split, task.row, state);
}

// Column j of a few rows.
struct RowsColumn {
  float const* values;
  int j;

  __device__ __forceinline__ float operator[](int u) const { return values[u * kProgramColumns + j]; }
};

// A fragment's rows come in two parts where its values need not all be there at once, which saves 16 registers.
template <Reduction reduction>
struct ColumnFold {
  static constexpr Fold kFold = info_of(reduction).fold;
  static constexpr int kPart = kFold == Fold::kExponentials ? kColumnFragment : 2;
  static_assert(kFold != Fold::kTotal || kColumnFragment == 2 * kPart, "a tree of four elements is one of two halves");
  StaticOperations<reduction> operations;
  RowState states[kProgramColumns];
  float halves[kProgramColumns];

  __device__ __forceinline__ ColumnFold() {
    CUTFUSE_UNROLL
    for (int j = 0; j < kProgramColumns; ++j) states[j] = operations.initial();
  }

  template <int first>
  __device__ __forceinline__ void take(float const* values) {
    CUTFUSE_UNROLL
    for (int j = 0; j < kProgramColumns; ++j) {
      RowsColumn const column = {values, j};
      if constexpr (kFold != Fold::kTotal) {
        operations.template take<kPart>(states[j], column);
      } else if constexpr (first == 0) {
        halves[j] = detail::tree_sum<0, kPart>(column);
      } else {
        float const sum[1] = {halves[j] + detail::tree_sum<0, kPart>(column)};
        operations.template take<1>(states[j], sum);
      }
    }
  }
};

// What block_position says, in 32 bits and without a division.
struct ColumnStart {
  int x;
  int y;
  uint32_t split;
  uint32_t outer;
  uint32_t column;
  bool active;
};

__device__ __forceinline__ ColumnStart column_start(ReduceExtents const& extents, ReducePlan const& plan,
                                                    uint32_t thread) {
  uint32_t const width = static_cast<uint32_t>(plan.width);
  uint32_t const period = static_cast<uint32_t>(plan.period);
  uint32_t const threads = static_cast<uint32_t>(extents.outer) * period;
  uint32_t const y = divide_by(thread, plan.by_width);
  uint32_t const x = thread - y * width;
  uint32_t const split = plan.splits == 1 ? 0 : divide_by(blockIdx.x, plan.by_tiles);
  uint32_t const tiles = plan.splits == 1 ? 0 : divide_by(threads + width - 1, plan.by_width);
  uint32_t const index = (blockIdx.x - split * tiles) * width + x;
  bool const active = index < threads;
  uint32_t const outer = active && extents.outer > 1 ? divide_by(index, plan.by_period) : 0;
  return {static_cast<int>(x), static_cast<int>(y), split, outer, index - outer * period, active};
}

// threadIdx.x, which nvcc does not know to be it: it would keep what comes of it in registers through the loop.
__device__ __forceinline__ uint32_t own_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

template <Reduction reduction>
__device__ __forceinline__ void store_columns(ReduceParameters const& reduce, ColumnStart const& at,
                                              RowState const (&states)[kProgramColumns]) {
  ReduceExtents const& extents = reduce.extents;
  int64_t const first = at.outer * extents.inner + static_cast<int64_t>(at.column) * kProgramColumns;
  int64_t const partial = at.split * (extents.outer * extents.inner) + first;
  CUTFUSE_UNROLL
  for (int j = 0; j < kProgramColumns; ++j) {
    if (reduce.partials != nullptr) {
      FoldOf<reduction>::store(reduce.partials, partial + j, states[j]);
    } else {
      store_result(reduce, 0, first + j, states[j]);
    }
  }
}

template <Reduction reduction, class T>
__device__ __forceinline__ void reduce_columns(ReduceProgramParameters const& parameters) {
  using Columns = ColumnFold<reduction>;
  using ColumnLine = Line<T, kProgramColumns, kColumnFragment, Columns::kPart>;
  constexpr bool kWaits = Columns::kPart == kColumnFragment;
  mark_layout<kProgramColumns, ColumnLine::kPieces, kColumnRegisters + (kWaits ? kExponentialRegisters : 0)>();
  ReduceParameters const& reduce = parameters.reduce;
  ReduceExtents const& extents = reduce.extents;
  ReducePlan const& plan = reduce.plan;
  Columns fold;
  if (ColumnStart const position = column_start(extents, plan, threadIdx.x); position.active) {
    int64_t const begin = position.split * plan.chunk + position.y;
    int64_t const split_end = position.split * plan.chunk + plan.chunk;
    int64_t const rows = (split_end < extents.reduced ? split_end : extents.reduced) - begin;
    int64_t const column = static_cast<int64_t>(position.column) * kProgramColumns;
    mark_locate<2>(position.outer, begin, column, plan.height);
    T const* const data = static_cast<T const*>(reduce.x.data) + position.outer * reduce.x.strides[0] +
                          begin * reduce.x.strides[1] + column;
    uint32_t const up = rows <= 0 ? 0 : static_cast<uint32_t>(rows) + static_cast<uint32_t>(plan.height) - 1;
    ColumnLine line = {data, plan.height * reduce.x.strides[1], static_cast<int>(divide_by(up, plan.by_height))};
    line.take_all(fold);
  }
  // Found again, so that it takes no registers from the loop.
  ColumnStart const same = column_start(extents, plan, own_thread());
  __shared__ ColumnStorage<kProgramColumns> storage;
  combine_height<kProgramColumns>(fold.operations, fold.states, storage, same, plan);
  if (same.active && same.y == 0) store_columns<reduction>(reduce, same, fold.states);
}

}  // namespace
}  // namespace cutfuse

#define CUTFUSE_TEMPLATE(Camel, name, type, T)                                                           \
  extern "C" __global__ void __launch_bounds__(cutfuse::kBlockThreads, cutfuse::kRowBlocks)              \
      row_reduce_##name##_##type(__grid_constant__ cutfuse::ReduceProgramParameters const problem) {     \
    cutfuse::reduce_rows<cutfuse::Reduction::k##Camel, T>(problem);                                      \
  }                                                                                                      \
  extern "C" __global__ void __launch_bounds__(cutfuse::kBlockThreads, cutfuse::kColumnBlocks)           \
      strided_reduce_##name##_##type(__grid_constant__ cutfuse::ReduceProgramParameters const problem) { \
    cutfuse::reduce_columns<cutfuse::Reduction::k##Camel, T>(problem);                                   \
  }

#define CUTFUSE_TEMPLATES(Camel, name)           \
  CUTFUSE_TEMPLATE(Camel, name, float32, float)  \
  CUTFUSE_TEMPLATE(Camel, name, float16, __half) \
  CUTFUSE_TEMPLATE(Camel, name, bfloat16, __nv_bfloat16)

// One for each fold, by the name of its first reduction: until finish a mean is a sum.
CUTFUSE_TEMPLATES(Sum, sum)
#define CUTFUSE_ADDITIVE_REDUCTION(...)
#define CUTFUSE_REDUCTION(Camel, name, ...) CUTFUSE_TEMPLATES(Camel, name)
#include "reduce/reductions.def"
