// A program that is interpreted over a tensor: by vectors where its rows are aligned and contiguous, and by lines.
#include "common/launch.h"
#include "epilogue/fragment_line.h"
#include "epilogue/interpreter.h"
#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

struct VectorOperands {
  PointwiseParameters const& parameters;
  VectorPosition const& at;

  __device__ __forceinline__ Fragment<kVectorElements> operator()(int index) const {
    PointwisePlan const& plan = parameters.plan;
    FragmentLine const line = {at.outer, at.row, at.column, kAlongColumns, plan.shift, plan.step, at.count};
    return load_line<kVectorElements>(parameters.operands.items[index], line);
  }
};

// Not inlined, for the reason that row_reduce_program gives.
template <class T>
__device__ __noinline__ void compute_and_store(PointwiseParameters const& parameters, VectorPosition at,
                                               VectorFragment<T, kVectorElements> pieces) {
  Fragment<kVectorElements> const result =
      interpret<kVectorElements, PrimitivesFor<T>>(parameters.program, pieces.values(), VectorOperands{parameters, at});
  T* const out = static_cast<T*>(parameters.out.data) + offset_at(parameters.out, at);
  store_fragment(out, parameters.plan.step, at.count, result);
}

template <class T>
struct Interpreted {
  static constexpr int kPieces = VectorFragment<T, kVectorElements>::kPieces;
  PointwiseParameters const& parameters;  // in shared memory

  __device__ __forceinline__ void begin(VectorPosition const& at) const { prefetch(at); }

  // The interpreter loads an operand when it comes to it, with nothing else to do meanwhile: have it in the L2 by then.
  __device__ __forceinline__ void prefetch(VectorPosition const& at) const {
    CUTFUSE_NO_UNROLL
    for (int k = 0; k < parameters.program.operand_count; ++k) {
      Operand const& operand = parameters.operands.items[k];
      if (operand.strides[2] != 1) continue;
      int64_t const size = static_cast<int64_t>(size_of(operand.dtype));
      char const* const data = static_cast<char const*>(operand.data) + offset_at(operand, at) * size;
      CUTFUSE_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        int const offset = piece * parameters.plan.step;
        if (offset < at.count) prefetch_to_l2(data + offset * size);
      }
    }
  }

  __device__ __forceinline__ void operator()(VectorPosition const& at,
                                             VectorFragment<T, kVectorElements> const& pieces) const {
    compute_and_store(parameters, at, pieces);
  }
};

template <class T>
__global__ void __launch_bounds__(kVectorThreads, 4) pointwise(__grid_constant__ PointwiseParameters const parameters) {
  __shared__ PointwiseParameters shared;
  copy_to_shared(parameters, shared);
  begin_behind_previous_kernel();
  run_vectors<T, kVectorElements>(parameters, Interpreted<T>{shared});
}

// A program over a tensor of any strides, alignment and element types, all known at run time only. A thread's fragment
// lies along columns where these come in aligned groups of four, and along rows otherwise, so that neighbouring threads
// touch neighbouring columns.

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
  begin_behind_previous_kernel();
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

cudaError_t launch_pointwise_vectors(PointwiseParameters const& parameters, cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  return dispatch_dtype(parameters.x.dtype, [&](auto tag) {
    return launch(pointwise<typename decltype(tag)::type>, block_count(plan), plan.width * plan.height, stream,
                  parameters);
  });
}

cudaError_t launch_pointwise_lines(PointwiseParameters const& parameters, cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  return launch(pointwise_lines, block_count(plan), plan.width * plan.height, stream, parameters);
}

}  // namespace cutfuse
