// The derivatives of a program times the incoming gradient: each wanted one is a run of the program over dual numbers.
// Also the weights that a reduction after the program gives to its elements, and the column sums that a bias gradient
// is made of.
#include "common/launch.h"
#include "epilogue/fragment_line.h"
#include "epilogue/interpreter.h"
#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

constexpr int kFragment = kPointwiseFragment;
using Values = Fragment<kFragment>;

// The reductions of a gradient, for the labels of a switch.
constexpr Reduction reduction_with(ReductionGradient gradient, int number = 0) {
  for (ReductionInfo const& info : kReductions) {
    if (info.gradient == gradient && number-- == 0) return info.code;
  }
  return Reduction::kNone;
}

constexpr bool has_reductions(ReductionGradient gradient, int count) {
  return reduction_with(gradient, count - 1) != Reduction::kNone && reduction_with(gradient, count) == Reduction::kNone;
}
static_assert(has_reductions(ReductionGradient::kShare, 1) && has_reductions(ReductionGradient::kTies, 2) &&
                  has_reductions(ReductionGradient::kSoftmax, 1),
              "apply_weight has a label for each reduction of reductions.def");

// What a row's gradient is multiplied by for each of its elements.
__device__ __forceinline__ void apply_weight(PointwiseBackwardParameters const& parameters, FragmentLine const& line,
                                             Values const& y, Values& gradient) {
  switch (parameters.reduction) {
    case reduction_with(ReductionGradient::kShare):
      CUTFUSE_UNROLL
      for (int i = 0; i < kFragment; ++i) gradient.values[i] /= static_cast<float>(parameters.columns);
      return;
    case reduction_with(ReductionGradient::kTies):
    case reduction_with(ReductionGradient::kTies, 1): {
      Values const extreme = load_line<kFragment>(parameters.row_result, line);
      Values const ties = load_line<kFragment>(parameters.tie_count, line);
      CUTFUSE_UNROLL
      for (int i = 0; i < kFragment; ++i) {
        // A row with a NaN in it has no ties: 0 / 0, as in torch.
        gradient.values[i] *= (y.values[i] == extreme.values[i] ? 1.0f : 0.0f) / ties.values[i];
      }
      return;
    }
    case reduction_with(ReductionGradient::kSoftmax): {
      Values const result = load_line<kFragment>(parameters.row_result, line);
      CUTFUSE_UNROLL
      for (int i = 0; i < kFragment; ++i) gradient.values[i] *= expf(y.values[i] - result.values[i]);
      return;
    }
    default:
      return;
  }
}

// Computes and stores a line of every wanted derivative; adds the one with respect to x to `sums`. Not inlined, for the
// reason that row_reduce_program gives.
template <class Primitives>
__device__ __noinline__ Values differentiate_line(PointwiseBackwardParameters const& parameters, FragmentLine line,
                                                  Values sums) {
  Values const x = load_line<kFragment>(parameters.x, line);
  CUTFUSE_NO_UNROLL
  for (int w = 0; w < parameters.derivative_count; ++w) {
    int const wrt = parameters.wrt[w];
    Dual<kFragment> const result = differentiate<kFragment, Primitives>(
        parameters.program, x, wrt, LoadLineOperand<kFragment>{&parameters.operands, line});
    Values gradient = load_line<kFragment>(parameters.grad, line);
    apply_weight(parameters, line, result.value, gradient);
    CUTFUSE_UNROLL
    for (int i = 0; i < kFragment; ++i) {
      gradient.values[i] = input_gradient(gradient.values[i], result.tangent.values[i]);
    }
    if (parameters.outputs[w].data != nullptr) store_line(parameters.outputs[w], line, gradient);
    if (wrt == 0) {
      CUTFUSE_UNROLL
      for (int i = 0; i < kFragment; ++i) sums.values[i] += line.offset(i) < line.count ? gradient.values[i] : 0.0f;
    }
  }
  return sums;
}

// Adds the block's threads above each other, one after the other, and stores a row of column sums.
__device__ __forceinline__ void store_column_sums(PointwiseBackwardParameters const& parameters,
                                                  FragmentLine const& line, Values const& sums) {
  __shared__ float storage[kBlockThreads * kFragment];
  PointwisePlan const& plan = parameters.plan;
  int const y = static_cast<int>(threadIdx.x) / plan.width;
  int const x = static_cast<int>(threadIdx.x) - y * plan.width;
  int const columns = plan.along_rows ? plan.width : plan.width * kFragment;
  if (plan.along_rows) {
    float total = 0.0f;
    CUTFUSE_UNROLL
    for (int i = 0; i < kFragment; ++i) total += sums.values[i];
    storage[threadIdx.x] = total;
  } else {
    CUTFUSE_UNROLL
    for (int i = 0; i < kFragment; ++i) storage[y * columns + (x << plan.shift) + line.offset(i)] = sums.values[i];
  }
  __syncthreads();
  uint32_t const column_tiles = static_cast<uint32_t>(plan.column_tiles);
  int64_t const row_block = blockIdx.x / column_tiles;
  int64_t const first_column = (blockIdx.x % column_tiles) * plan.tile_columns;
  for (int column = static_cast<int>(threadIdx.x); column < columns; column += static_cast<int>(blockDim.x)) {
    if (first_column + column >= plan.extents.columns) continue;
    float total = storage[column];
    for (int row = 1; row < plan.height; ++row) total += storage[row * columns + column];
    parameters.column_partials[row_block * plan.extents.columns + first_column + column] = total;
  }
}

template <class Primitives>
__global__ void __launch_bounds__(kBlockThreads, 2)
    pointwise_backward(__grid_constant__ PointwiseBackwardParameters const parameters) {
  __shared__ PointwiseBackwardParameters shared;
  copy_to_shared(parameters, shared);
  begin_behind_previous_kernel();
  PointwisePlan const& plan = parameters.plan;
  PointwisePosition position = pointwise_position(plan);
  FragmentLine line = pointwise_line(plan, position);
  Values sums = {};
  CUTFUSE_NO_UNROLL
  for (; position.row < position.row_end; position.row += rows_per_step(plan)) {
    line.row = position.row;
    line.count = elements_left(plan, position);
    if (line.count > 0) sums = differentiate_line<Primitives>(shared, line, sums);
  }
  if (parameters.column_partials != nullptr) store_column_sums(parameters, line, sums);
}

}  // namespace

cudaError_t launch_pointwise_backward(PointwiseBackwardParameters const& parameters, cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  auto const kernel =
      parameters.is_accurate ? pointwise_backward<AccuratePrimitives> : pointwise_backward<FastPrimitives>;
  return launch(kernel, block_count(plan), plan.width * plan.height, stream, parameters);
}

}  // namespace cutfuse
