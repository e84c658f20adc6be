// strided_reduce with a program over every element first: fragments lie along aligned inner rows, or, where rows are
// not aligned, along the reduced dimension.
#include "common/shared_copy.h"
#include "epilogue/fragment_line.h"
#include "epilogue/interpreter.h"
#include "reduce/combine_columns.h"
#include "reduce/kernels.h"

namespace cutfuse {
namespace {

constexpr int kFragment = 8;

template <int vector>
struct ColumnStates {
  RowState columns[vector];
};

// Not inlined, for the reason that row_reduce_program gives.
template <int vector>
__device__ __noinline__ ColumnStates<vector> take_fragment(ReduceProgramParameters const& parameters, FragmentLine line,
                                                           ColumnStates<vector> states) {
  RuntimeOperations const operations = {parameters.reduce.reduction};
  Fragment<kFragment> values = load_line<kFragment>(parameters.reduce.x, line);
  values = interpret(parameters.program, values, LoadLineOperand<kFragment>{&parameters.operands, line});
  if constexpr (vector == 1) {
    CUTFUSE_UNROLL
    for (int i = 0; i < kFragment; ++i) {
      if (line.offset(i) >= line.count) values.values[i] = operations.fill();
    }
    operations.take<kFragment>(states.columns[0], values.values);
  } else {
    CUTFUSE_UNROLL
    for (int j = 0; j < vector; ++j) operations.take<1>(states.columns[j], values.values + j);
  }
  return states;
}

// vector: columns of a thread, a whole fragment of them or one.
template <int vector>
__global__ void __launch_bounds__(kBlockThreads, vector == 1 ? 3 : 2)
    strided_reduce_program(__grid_constant__ ReduceProgramParameters const parameters) {
  __shared__ ReduceProgramParameters shared;
  copy_to_shared(parameters, shared);
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
    constexpr int kRows = kFragment / vector;
    FragmentLine line = {};
    line.outer = position.outer;
    line.column = position.column * vector;
    line.dimension = vector == 1 ? kAlongRows : kAlongColumns;
    line.shift = vector == 1 ? 0 : 3;
    line.step = plan.height;
    line.count = kFragment;
    CUTFUSE_NO_UNROLL
    for (line.row = position.split * plan.chunk + position.y; line.row < end; line.row += plan.height * kRows) {
      if (vector == 1) line.count = count_within(end - line.row);
      states = take_fragment(shared, line, states);
    }
  }
  combine_columns<vector>(operations, states.columns, reduce, position, thread);
}

}  // namespace

cudaError_t launch_strided_reduce_program(ReduceProgramParameters const& parameters, cudaStream_t stream) {
  ReducePlan const& plan = parameters.reduce.plan;
  int64_t const tiles = ceil_divide(parameters.reduce.extents.outer * plan.period, plan.width);
  auto const kernel = plan.vector == 1 ? strided_reduce_program<1> : strided_reduce_program<kFragment>;
  return launch(kernel, tiles * plan.splits, plan.width * plan.height, stream, parameters);
}

}  // namespace cutfuse
