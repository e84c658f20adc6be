// What specialized epilogues are put together from: every op of ops.def and the operand loaders, each as a function of
// its own. No kernel is linked with this file: the build compiles it to PTX and embeds the text, which op_snippets.h
// reads.
//
// The functions are the interpreter's functors, compiled with -fmad=false, so that an op keeps its rounding whatever
// code is pasted next to it. They give the interpreter's bits because ops.def and scalar_math.h say fmaf wherever they
// mean a fused multiply-add. What compilers still contract in the interpreter rounds the same either way: 1 + expf(x),
// where expf's last step multiplies by a power of two, which is exact unless the sum is 1 anyway, and the negation of a
// product in entr.
#include "epilogue/functors.h"
#include "epilogue/sm90_epilogue_function.h"
#include "specialize/epilogue_function.h"

#define CUTFUSE_OP(Camel, name, ...)                                                                           \
  extern "C" __device__ __noinline__ float op_fast_##name(float a, float b, float c, float p0, float p1) {     \
    return cutfuse::ops::Camel::forward<cutfuse::FastPrimitives>(a, b, c, p0, p1);                             \
  }                                                                                                            \
  extern "C" __device__ __noinline__ float op_accurate_##name(float a, float b, float c, float p0, float p1) { \
    return cutfuse::ops::Camel::forward<cutfuse::AccuratePrimitives>(a, b, c, p0, p1);                         \
  }
#include "epilogue/ops.def"

namespace cutfuse::sm90 {

static_assert(specialize::kFragment == kFragmentSize && specialize::kPass == kElementsPerGroup &&
                  specialize::kColumnsPerPass == kColumnsPerGroup,
              "the generator writes functions for this layout of fragments");
static_assert(offsetof(EpilogueParams, program) == 0, "the generator reads the program's numbers from there");

template <class T>
__device__ __forceinline__ Fragment<kFragmentSize> load_operand(EpilogueParams const* params, int m, int n, int index) {
  FragmentOperands const operands = operands_at(params, m, n);
  return detail::load_fragment<T>(operands.operands->items[index], operands.position);
}

// The elements of one group of columns of a fragment, whose first column is n.
template <class T>
__device__ __forceinline__ Fragment<kElementsPerGroup> load_group(EpilogueParams const* params, int m, int n,
                                                                  int index) {
  Operand const& operand = params->operands.items[index];
  T const* const first = static_cast<T const*>(operand.data) + m * operand.strides[1] + n * operand.strides[2];
  Fragment<kElementsPerGroup> group;
  CUTFUSE_UNROLL
  for (int i = 0; i < kElementsPerGroup; ++i) {
    bool const inside = m + fragment_row(i) < params->rows && n + fragment_column(i) < params->columns;
    int64_t const offset = fragment_row(i) * operand.strides[1] + fragment_column(i) * operand.strides[2];
    group.values[i] = inside ? to_float(first[offset]) : 0.0f;
  }
  return group;
}

}  // namespace cutfuse::sm90

// The two loaders of an operand, for each type of its elements by the name of the type.
#define CUTFUSE_LOADERS(name, Element)                                                                      \
  extern "C" __device__ __noinline__ cutfuse::Fragment<cutfuse::sm90::kFragmentSize> load_operand_##name(   \
      cutfuse::sm90::EpilogueParams const* params, int m, int n, int index) {                               \
    return cutfuse::sm90::load_operand<Element>(params, m, n, index);                                       \
  }                                                                                                         \
  extern "C" __device__ __noinline__ cutfuse::Fragment<cutfuse::sm90::kElementsPerGroup> load_group_##name( \
      cutfuse::sm90::EpilogueParams const* params, int m, int n, int index) {                               \
    return cutfuse::sm90::load_group<Element>(params, m, n, index);                                         \
  }

CUTFUSE_LOADERS(float32, float)
CUTFUSE_LOADERS(float16, __half)
CUTFUSE_LOADERS(bfloat16, __nv_bfloat16)
