// strided_reduce with a program over every element first: fragments lie along aligned inner rows, of which a thread
// takes a few into its states at once, or, where rows are not aligned, along the reduced dimension.
#include "common/launch.h"
#include "epilogue/fragment_line.h"
#include "epilogue/interpreter.h"
#include "reduce/combine.h"
#include "reduce/kernels.h"

namespace cutfuse {
namespace {

constexpr int kFragment = 8;
static_assert(kFragment == kProgramColumns, "a fragment of whole vectors is a thread's part of a row");

template <int vector>
struct ColumnStates {
  RowState columns[vector];
};

// Column j of a few rows.
struct RowsColumn {
  Fragment<kFragment> const* rows;
  int j;

  __device__ __forceinline__ float operator[](int u) const { return rows[u].values[j]; }
};

// So many rows of whole vectors, `height` apart, of which those from `existing` rows on do not exist. They wait in
// local memory for each other, as the interpreter's slots do.
__device__ __forceinline__ void take_rows(ReduceProgramParameters const& parameters, FragmentLine line, int existing,
                                          ColumnStates<kProgramColumns>& states) {
  RuntimeOperations const operations = {parameters.reduce.reduction};
  int const height = parameters.reduce.plan.height;
  Fragment<kFragment> rows[kColumnFragment];
  CUTFUSE_NO_UNROLL
  for (int u = 0; u < kColumnFragment; ++u) {
    interpreter::fill(rows[u], operations.fill());
    if (u * height >= existing) continue;
    Fragment<kFragment> const values = load_line<kFragment>(parameters.reduce.x, line);
    rows[u] = interpret(parameters.program, values, LoadLineOperand<kFragment>{&parameters.operands, line});
    line.row += height;
  }
  CUTFUSE_UNROLL
  for (int j = 0; j < kProgramColumns; ++j) {
    operations.take<kColumnFragment>(states.columns[j], RowsColumn{rows, j});
  }
}

// Not inlined, for the reason that row_reduce_program gives. existing: rows to the end.
template <int vector>
__device__ __noinline__ ColumnStates<vector> take_fragment(ReduceProgramParameters const& parameters, FragmentLine line,
                                                           int existing, ColumnStates<vector> states) {
  if constexpr (vector == 1) {
    RuntimeOperations const operations = {parameters.reduce.reduction};
    line.count = existing;
    Fragment<kFragment> values = load_line<kFragment>(parameters.reduce.x, line);
    values = interpret(parameters.program, values, LoadLineOperand<kFragment>{&parameters.operands, line});
    CUTFUSE_UNROLL
    for (int i = 0; i < kFragment; ++i) {
      if (line.offset(i) >= line.count) values.values[i] = operations.fill();
    }
    operations.take<kFragment>(states.columns[0], values.values);
  } else {
    take_rows(parameters, line, existing, states);
  }
  return states;
}

// vector: columns of a thread, a whole fragment of them or one.
template <int vector>
__global__ void __launch_bounds__(kBlockThreads, vector == 1 ? 3 : 2)
    strided_reduce_program(__grid_constant__ ReduceProgramParameters const parameters) {
  __shared__ ReduceProgramParameters shared;
  copy_to_shared(parameters, shared);
  begin_behind_previous_kernel();
  ReduceParameters const& reduce = parameters.reduce;
  ReduceExtents const& extents = reduce.extents;
  ReducePlan const& plan = reduce.plan;
  RuntimeOperations const operations = {reduce.reduction};
  BlockPosition const position = block_position(extents, plan);
  StridedThread const thread = strided_thread(extents, plan, position.column, 0);
  ColumnStates<vector> states;
  CUTFUSE_UNROLL
  for (int j = 0; j < vector; ++j) states.columns[j] = operations.initial();
  if (position.active) {
    int64_t const split_end = (position.split + 1) * plan.chunk;
    int64_t const end = split_end < extents.reduced ? split_end : extents.reduced;
    constexpr int kRows = vector == 1 ? kFragment : kColumnFragment;
    FragmentLine line = {};
    line.outer = position.outer;
    line.column = position.column * vector;
    line.dimension = vector == 1 ? kAlongRows : kAlongColumns;
    line.shift = vector == 1 ? 0 : 3;
    line.step = plan.height;
    line.count = kFragment;
    CUTFUSE_NO_UNROLL
    for (line.row = position.split * plan.chunk + position.y; line.row < end; line.row += plan.height * kRows) {
      states = take_fragment<vector>(shared, line, count_within(end - line.row), states);
    }
  }
  combine_columns<vector>(operations, states.columns, reduce, position, thread);
}

}  // namespace

cudaError_t launch_strided_reduce_program(ReduceProgramParameters const& parameters, cudaStream_t stream) {
  ReducePlan const& plan = parameters.reduce.plan;
  auto const kernel = plan.vector == 1 ? strided_reduce_program<1> : strided_reduce_program<kFragment>;
  return launch(kernel, block_count(parameters.reduce), threads_of(parameters.reduce.plan), stream, parameters);
}

}  // namespace cutfuse
