// A program over a tensor of any strides, alignment and element types, all known at run time only. A thread's fragment
// lies along columns where these come in aligned groups of four, and along rows otherwise, so that neighbouring threads
// touch neighbouring columns.
#include "common/shared_copy.h"
#include "epilogue/fragment_line.h"
#include "epilogue/interpreter.h"
#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

// Not inlined, for the reason that row_reduce_program gives.
__device__ __noinline__ void compute_line(PointwiseParameters const& parameters, FragmentLine line) {
  Fragment<kPointwiseFragment> values = load_line<kPointwiseFragment>(parameters.x, line);
  values = interpret(parameters.program, values, LoadLineOperand<kPointwiseFragment>{&parameters.operands, line});
  store_line(parameters.out, line, values);
}

__global__ void __launch_bounds__(kBlockThreads, 3)
    pointwise_lines(__grid_constant__ PointwiseParameters const parameters) {
  __shared__ PointwiseParameters shared;
  copy_to_shared(parameters, shared);
  PointwisePlan const& plan = parameters.plan;
  PointwisePosition position = pointwise_position(plan);
  FragmentLine line = pointwise_line(plan, position);
  CUTFUSE_NO_UNROLL
  for (; position.row < position.row_end; position.row += rows_per_step(plan)) {
    line.row = position.row;
    line.count = elements_left(plan, position);
    if (line.count > 0) compute_line(shared, line);
  }
}

}  // namespace

cudaError_t launch_pointwise_lines(PointwiseParameters const& parameters, cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  return launch(pointwise_lines, block_count(plan), plan.width * plan.height, stream, parameters);
}

}  // namespace cutfuse
