// The chains of chains.def, compiled in. For a 16-bit sigmoid the H200's copy bandwidth leaves 27 issue slots an
// element, of which the interpreter takes about 20 and this kernel 9.
#include "epilogue/primitives.h"
#include "pointwise/kernels.h"

namespace cutfuse {
namespace {

template <class Op, class T>
struct Chain {
  static_assert(Op::kArity == 1, "a chain is one op of the input, scaled and shifted");
  static constexpr int kElements = chain_elements<T>();
  PointwiseParameters const& parameters;
  T* out;

  __device__ __forceinline__ void begin(VectorPosition const& at) {
    out = static_cast<T*>(parameters.out.data) + offset_at(parameters.out, at);
  }

  __device__ __forceinline__ void prefetch(VectorPosition const&) const {}

  __device__ __forceinline__ float apply(float z) const {
    Program const& program = parameters.program;
    Instruction const& op = program.instructions[0];
    float const value = Op::template forward<PrimitivesFor<T>>(z, 0.0f, 0.0f, op.immediate[0], op.immediate[1]);
    return ::fmaf(value, op.scale, op.shift) + (program.adds_input ? z : 0.0f);
  }

  __device__ __forceinline__ void operator()(VectorPosition const& at, VectorFragment<T, kElements> const& pieces) {
    constexpr int kSize = kVectorSize<T>;
    // Piece by piece: all elements at once would take 61 registers of a 16-bit type, and a block less in flight.
    CUTFUSE_UNROLL
    for (int piece = 0; piece < kElements / kSize; ++piece) {
      float values[kSize];
      unpack(pieces.pieces[piece], values);
      CUTFUSE_UNROLL
      for (int i = 0; i < kSize; ++i) values[i] = apply(values[i]);
      Vector<T> packed;
      pack(values, packed);
      int const offset = piece * parameters.plan.step;
      if (offset < at.count) store_vector(out + offset, packed);
    }
    out += parameters.plan.height * parameters.out.strides[1];
  }
};

template <class Op, class T>
__global__ void __launch_bounds__(kVectorThreads, 10)
    pointwise_chain(__grid_constant__ PointwiseParameters const parameters) {
  begin_behind_previous_kernel();
  run_vectors<T, chain_elements<T>()>(parameters, Chain<Op, T>{parameters, nullptr});
}

template <class Op>
cudaError_t launch_op(PointwiseParameters const& parameters, cudaStream_t stream) {
  PointwisePlan const& plan = parameters.plan;
  return dispatch_dtype(parameters.x.dtype, [&](auto tag) {
    return launch(pointwise_chain<Op, typename decltype(tag)::type>, block_count(plan), plan.width * plan.height,
                  stream, parameters);
  });
}

}  // namespace

cudaError_t launch_pointwise_chain(PointwiseParameters const& parameters, cudaStream_t stream) {
  switch (parameters.program.chain) {
#define CUTFUSE_CHAIN(Camel)                   \
  case static_cast<int32_t>(OpCode::k##Camel): \
    return launch_op<ops::Camel>(parameters, stream);
#include "epilogue/chains.def"
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace cutfuse
