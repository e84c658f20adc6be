// row_reduce with a program over every element first. Element types, strides and the reduction are known at run time
// only: the interpretation costs more than they do.
#include "common/launch.h"
#include "epilogue/fragment_line.h"
#include "epilogue/interpreter.h"
#include "reduce/combine.h"
#include "reduce/kernels.h"

namespace cutfuse {
namespace {

constexpr int kFragment = kRowFragment;

struct RowProgramParameters {
  ReduceProgramParameters problem;
  int32_t shift;  // of a thread's line through the row: neighbours where they can be loaded as vectors
};

// Not inlined, so that nothing of it is kept in registers between two steps: what does not change from one to the next
// is cheap to compute again, and the interpreter needs the registers.
__device__ __noinline__ RowState take_fragment(RowProgramParameters const& parameters, FragmentLine line,
                                               RowState state) {
  ReduceProgramParameters const& problem = parameters.problem;
  RuntimeOperations const operations = {problem.reduce.reduction};
  Fragment<kFragment> values = load_line<kFragment>(problem.reduce.x, line);
  values = interpret(problem.program, values, LoadLineOperand<kFragment>{&problem.operands, line});
  CUTFUSE_UNROLL
  for (int i = 0; i < kFragment; ++i) {
    if (line.offset(i) >= line.count) values.values[i] = operations.fill();
  }
  operations.take<kFragment>(state, values.values);
  return state;
}

__global__ void __launch_bounds__(kBlockThreads, 2)
    row_reduce_program(__grid_constant__ RowProgramParameters const parameters) {
  __shared__ RowProgramParameters shared;
  copy_to_shared(parameters, shared);
  begin_behind_previous_kernel();
  ReduceParameters const& reduce = parameters.problem.reduce;
  ReduceExtents const& extents = reduce.extents;
  ReducePlan const& plan = reduce.plan;
  RuntimeOperations const operations = {reduce.reduction};
  RowTask const task = row_task(plan);
  bool const active = task.row < extents.outer * extents.inner;
  RowState state = operations.initial();
  if (active) {
    int64_t const chunk_end = (task.split + 1) * plan.chunk;
    int64_t const end = chunk_end < extents.reduced ? chunk_end : extents.reduced;
    FragmentLine line = {};
    line.outer = extents.inner == 1 ? task.row : task.row / extents.inner;
    line.column = task.row - line.outer * extents.inner;
    line.dimension = kAlongRows;
    line.shift = parameters.shift;
    line.step = plan.lanes << parameters.shift;
    CUTFUSE_NO_UNROLL
    for (line.row = task.split * plan.chunk + (task.lane << parameters.shift); line.row < end;
         line.row += static_cast<int64_t>(plan.lanes) * kFragment) {
      line.count = count_within(end - line.row);
      state = take_fragment(shared, line, state);
    }
  }
  state = combine_threads(operations, state, plan.lanes);
  if (active && task.lane == 0) store_result(reduce, task.split, task.row, state);
}

// 2^shift neighbours of a thread: a vector, as the kernel has that the program is compiled into, or as many as a load
// of a line takes.
int shift_of(ReduceParameters const& reduce) {
  if (reduce.plan.whole_vectors) return reduce.plan.vector == 4 ? 2 : 3;
  size_t const vector_bytes = kLineVector * size_of(reduce.x.dtype);
  bool const aligned = reinterpret_cast<uintptr_t>(reduce.x.data) % vector_bytes == 0 &&
                       (reduce.extents.outer == 1 || reduce.x.strides[0] % kLineVector == 0) &&
                       (reduce.extents.inner == 1 || reduce.x.strides[2] % kLineVector == 0);
  return aligned ? 2 : 0;
}

}  // namespace

cudaError_t launch_row_reduce_program(ReduceProgramParameters const& problem, cudaStream_t stream) {
  RowProgramParameters const parameters = {problem, shift_of(problem.reduce)};
  return launch(row_reduce_program, block_count(problem.reduce), kBlockThreads, stream, parameters);
}

}  // namespace cutfuse
