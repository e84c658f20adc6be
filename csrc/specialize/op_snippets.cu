// What specialized epilogues are put together from: every op of ops.def and the operand loaders, each as a function of
// its own. No kernel is linked with this file: the build compiles it to PTX and embeds the text, which op_snippets.h
// reads.
//
// The functions are the interpreter's functors, compiled with -fmad=false, so that an op keeps its rounding whatever
// code is pasted next to it. They give the interpreter's bits because ops.def and primitives.h say fmaf
// wherever they mean a fused multiply-add. What compilers still contract in the interpreter rounds the same either way:
// 1 + expf(x), where expf's last step multiplies by a power of two, which is exact unless the sum is 1 anyway, and the
// negation of a product in entr.
#include "epilogue/primitives.h"
#include "epilogue/sm90_epilogue_function.h"
#include "specialize/epilogue_function.h"

#define CUTFUSE_OP(Camel, name, arity, parameters, cost, fast, accurate, signature, aliases, forward_, eager, ...) \
  extern "C" __device__ __noinline__ float op_fast_##name(float a, float b, float c, float p0, float p1) {         \
    return cutfuse::ops::Camel::forward<cutfuse::FastPrimitives>(a, b, c, p0, p1);                                 \
  }                                                                                                                \
  extern "C" __device__ __noinline__ float op_accurate_##name(float a, float b, float c, float p0, float p1) {     \
    return cutfuse::ops::Camel::forward<cutfuse::AccuratePrimitives>(a, b, c, p0, p1);                             \
  }                                                                                                                \
  extern "C" __device__ __noinline__ float op_eager_##name(float a, float b, float c, float p0, float p1) {        \
    using namespace cutfuse;                                                                                       \
    [[maybe_unused]] float const exact = ops::Camel::forward<AccuratePrimitives>(a, b, c, p0, p1);                 \
    [[maybe_unused]] float const kept = exact, none = NAN;                                                         \
    return eager;                                                                                                  \
  }
#include "epilogue/ops.def"

namespace cutfuse {

// What compiled derivatives take of an op's derivative with respect to one argument: the factor of its tangent, and
// where a mask passes that one or not, the bits 1 for an element that is masked.
__device__ __forceinline__ float terms_of(float derivative) { return derivative; }
__device__ __forceinline__ Fragment<2> terms_of(MaskedDerivative derivative) {
  return {derivative.factor, from_bits<float>(derivative.passes ? 0u : 1u)};
}
__device__ __forceinline__ float terms_of(NoDerivative) { return kMaskedTangent; }

}  // namespace cutfuse

// Of the arguments and the op's value y, for each argument of an op.
#define CUTFUSE_DERIVATIVE(Camel, name, argument, primitives, Primitives)                                              \
  extern "C" __device__ __noinline__ auto derivative_##primitives##_##argument##_##name(float a, float b, float c,     \
                                                                                        float p0, float p1, float y) { \
    using cutfuse::ops::Camel;                                                                                         \
    return cutfuse::terms_of(Camel::derivative_##argument<cutfuse::Primitives>(a, b, c, p0, p1, y));                   \
  }
#define CUTFUSE_DERIVATIVE_OF(Camel, name, argument)              \
  CUTFUSE_DERIVATIVE(Camel, name, argument, fast, FastPrimitives) \
  CUTFUSE_DERIVATIVE(Camel, name, argument, accurate, AccuratePrimitives)
#define CUTFUSE_DERIVATIVES_1(Camel, name) CUTFUSE_DERIVATIVE_OF(Camel, name, a)
#define CUTFUSE_DERIVATIVES_2(Camel, name) CUTFUSE_DERIVATIVES_1(Camel, name) CUTFUSE_DERIVATIVE_OF(Camel, name, b)
#define CUTFUSE_DERIVATIVES_3(Camel, name) CUTFUSE_DERIVATIVES_2(Camel, name) CUTFUSE_DERIVATIVE_OF(Camel, name, c)
#define CUTFUSE_OP(Camel, name, arity, ...) CUTFUSE_DERIVATIVES_##arity(Camel, name)
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

template <class T>
__device__ __forceinline__ T const* elements_of(Operand const& operand) {
  return static_cast<T const*>(operand.data);
}

template <class T>
__device__ __forceinline__ Fragment<1> load_scalar(EpilogueParams const* params, int index) {
  return {{to_float(*elements_of<T>(params->operands.items[index]))}};
}

// The two rows of a fragment.
template <class T>
__device__ __forceinline__ Fragment<kRowsPerFragment> load_column(EpilogueParams const* params, int m, int index) {
  Operand const& operand = params->operands.items[index];
  Fragment<kRowsPerFragment> column;
  CUTFUSE_UNROLL
  for (int i = 0; i < kRowsPerFragment; ++i) {
    int const row = m + fragment_row(2 * i);
    column.values[i] = row < params->rows ? to_float(elements_of<T>(operand)[row * operand.strides[1]]) : 0.0f;
  }
  return column;
}

// The columns of a fragment, two neighbours in one load.
template <class T>
__device__ __forceinline__ Fragment<kColumnsPerFragment> load_neighbours(T const* first) {
  Fragment<kColumnsPerFragment> row;
  CUTFUSE_UNROLL
  for (int i = 0; i < kColumnsPerFragment; i += 2) {
    float2 const pair = detail::load_pair(first + fragment_column(2 * i));
    row.values[i] = pair.x;
    row.values[i + 1] = pair.y;
  }
  return row;
}

// The columns of a fragment, of a contiguous row: neighbours in one load where their place allows that.
template <class T>
__device__ __forceinline__ Fragment<kColumnsPerFragment> load_row(EpilogueParams const* params, int n, int index) {
  T const* const first = elements_of<T>(params->operands.items[index]) + n;
  bool const whole = n + fragment_column(kFragmentSize - 1) < params->columns;
  bool const aligned = reinterpret_cast<uintptr_t>(first) % (2 * sizeof(T)) == 0;
  if (whole && aligned) return load_neighbours(first);
  Fragment<kColumnsPerFragment> row;
  CUTFUSE_UNROLL
  for (int i = 0; i < kColumnsPerFragment; ++i) {
    int const column = fragment_column(2 * (i & ~1) + (i & 1));
    row.values[i] = n + column < params->columns ? to_float(first[column]) : 0.0f;
  }
  return row;
}

// Of operands that are staged: their one element, those of the fragment's rows and those of its columns. A tile begins
// at a multiple of its size, which is a power of two.
extern "C" __device__ __noinline__ Fragment<1> load_staged_scalar(EpilogueParams const* params, int index) {
  return {{*staged_elements(params, index)}};
}

extern "C" __device__ __noinline__ Fragment<kRowsPerFragment> load_staged_column(EpilogueParams const* params, int m,
                                                                                 int index) {
  float const* const first = staged_elements(params, index) + (m & (params->tile_rows - 1));
  return {{first[0], first[fragment_row(2)]}};
}

extern "C" __device__ __noinline__ Fragment<kColumnsPerFragment> load_staged_row(EpilogueParams const* params, int n,
                                                                                 int index) {
  return load_neighbours(staged_elements(params, index) + (n & (params->tile_columns - 1)));
}

// The loaders of an operand, for each type of its elements by the name of the type.
#define CUTFUSE_LOADERS(name, Element)                                                                                \
  extern "C" __device__ __noinline__ Fragment<kFragmentSize> load_operand_##name(EpilogueParams const* params, int m, \
                                                                                 int n, int index) {                  \
    return load_operand<Element>(params, m, n, index);                                                                \
  }                                                                                                                   \
  extern "C" __device__ __noinline__ Fragment<kElementsPerGroup> load_group_##name(EpilogueParams const* params,      \
                                                                                   int m, int n, int index) {         \
    return load_group<Element>(params, m, n, index);                                                                  \
  }                                                                                                                   \
  extern "C" __device__ __noinline__ Fragment<1> load_scalar_##name(EpilogueParams const* params, int index) {        \
    return load_scalar<Element>(params, index);                                                                       \
  }                                                                                                                   \
  extern "C" __device__ __noinline__ Fragment<kRowsPerFragment> load_column_##name(EpilogueParams const* params,      \
                                                                                   int m, int index) {                \
    return load_column<Element>(params, m, index);                                                                    \
  }                                                                                                                   \
  extern "C" __device__ __noinline__ Fragment<kColumnsPerFragment> load_row_##name(EpilogueParams const* params,      \
                                                                                   int n, int index) {                \
    return load_row<Element>(params, n, index);                                                                       \
  }

CUTFUSE_LOADERS(float32, float)
CUTFUSE_LOADERS(float16, __half)
CUTFUSE_LOADERS(bfloat16, __nv_bfloat16)

}  // namespace cutfuse::sm90

namespace cutfuse {

// A word holds one element of four bytes or two of two. A stride of 0 is that of copies of one element.
template <class Bits, int N>
__device__ __forceinline__ Fragment<N* static_cast<int>(sizeof(Bits)) / 4> load_words(Bits const* data,
                                                                                      int64_t stride) {
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(Bits));
  Fragment<N / kPerWord> words;
  if (stride == 0) {
    uint32_t const bits = *data;
    interpreter::fill(words, from_bits<float>(kPerWord == 2 ? bits * 0x10001u : bits));
    return words;
  }
  CUTFUSE_UNROLL
  for (int i = 0; i < N / kPerWord; ++i) {
    uint32_t bits = data[i * kPerWord * stride];
    if constexpr (kPerWord == 2) bits |= static_cast<uint32_t>(data[(i * kPerWord + 1) * stride]) << 16;
    words.values[i] = from_bits<float>(bits);
  }
  return words;
}

template <class T, int N>
__device__ __forceinline__ Fragment<N> unpack_words(float const* words) {
  Vector<T, N> vector;
  CUTFUSE_UNROLL
  for (int i = 0; i < N / 2; ++i) vector.words[i] = to_bits(words[i]);
  Fragment<N> values;
  unpack(vector, values.values);
  return values;
}

}  // namespace cutfuse

#define CUTFUSE_LOAD_WORDS(bits, count)                                                                \
  extern "C" __device__ __noinline__ cutfuse::Fragment<count * bits / 32> load_words_##bits##_##count( \
      uint##bits##_t const* data, int64_t stride) {                                                    \
    return cutfuse::load_words<uint##bits##_t, count>(data, stride);                                   \
  }

CUTFUSE_LOAD_WORDS(16, 4)
CUTFUSE_LOAD_WORDS(16, 8)
CUTFUSE_LOAD_WORDS(32, 4)
CUTFUSE_LOAD_WORDS(32, 8)

#define CUTFUSE_UNPACK(name, Element)                                                                                 \
  extern "C" __device__ __noinline__ cutfuse::Fragment<4> unpack_##name##_4(float w0, float w1) {                     \
    float const words[] = {w0, w1};                                                                                   \
    return cutfuse::unpack_words<Element, 4>(words);                                                                  \
  }                                                                                                                   \
  extern "C" __device__ __noinline__ cutfuse::Fragment<8> unpack_##name##_8(float w0, float w1, float w2, float w3) { \
    float const words[] = {w0, w1, w2, w3};                                                                           \
    return cutfuse::unpack_words<Element, 8>(words);                                                                  \
  }

CUTFUSE_UNPACK(float16, __half)
CUTFUSE_UNPACK(bfloat16, __nv_bfloat16)
