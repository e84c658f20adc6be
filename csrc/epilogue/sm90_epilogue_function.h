// What the epilogue of every sm_90 GEMM calls for a fragment: the function that runs the program, and the operands that
// it reads, from memory or staged. Apart from the visitor and its CUTLASS headers, so that the snippets of specialize/
// are compiled against the same.
#pragma once

#include "common/vector_access.h"
#include "epilogue/interpreter.h"
#include "epilogue/program.h"
#include "reduce/reductions.h"

namespace cutfuse::sm90 {

// Accumulator layout of wgmma m64nNk16 as a thread sees a 64x32 epilogue subtile: two neighbouring columns, then the
// row eight below, then the next group of eight columns.
constexpr int kFragmentSize = 16;
constexpr int kRowsPerFragment = 2;
constexpr int kColumnsPerFragment = kFragmentSize / kRowsPerFragment;
constexpr int kLanesPerRow = 4;
constexpr int kElementsPerGroup = 4;
constexpr int kColumnsPerGroup = 8;
CUTFUSE_HOST_DEVICE constexpr int fragment_row(int i) { return ((i >> 1) & 1) * 8; }
CUTFUSE_HOST_DEVICE constexpr int fragment_column(int i) { return (i >> 2) * 8 + (i & 1); }

struct FragmentPosition {
  int m;
  int n;
  int rows;  // M and N: where the matrix ends
  int columns;
};

namespace detail {

__device__ __forceinline__ float2 load_pair(float const* data) { return *reinterpret_cast<float2 const*>(data); }
__device__ __forceinline__ float2 load_pair(__half const* data) {
  return __half22float2(*reinterpret_cast<__half2 const*>(data));
}
__device__ __forceinline__ float2 load_pair(__nv_bfloat16 const* data) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(data));
}

// One column at a time, with every bound checked. A loop over groups of columns, through whose first elements the
// fragment is rotated, because unrolled its addresses alone would spill beside the accumulators.
template <class T>
__device__ __forceinline__ Fragment<kFragmentSize> load_elements(T const* first, Operand const& operand,
                                                                 FragmentPosition position) {
  Fragment<kFragmentSize> fragment;
  CUTFUSE_NO_UNROLL
  for (int group = 0; group < kFragmentSize / kElementsPerGroup; ++group) {
    CUTFUSE_UNROLL
    for (int i = 0; i < kElementsPerGroup; ++i) {
      int const column = group * kColumnsPerGroup + fragment_column(i);
      bool const inside = position.m + fragment_row(i) < position.rows && position.n + column < position.columns;
      int64_t const offset = fragment_row(i) * operand.strides[1] + column * operand.strides[2];
      fragment.values[i] = inside ? to_float(first[offset]) : 0.0f;
    }
    interpreter::rotate<kElementsPerGroup>(fragment);
  }
  return fragment;
}

// Two neighbouring columns in one load, all of them in flight at once.
template <class T>
__device__ __forceinline__ Fragment<kFragmentSize> load_pairs(T const* upper, int64_t row_stride) {
  T const* const lower = upper + fragment_row(2) * row_stride;
  Fragment<kFragmentSize> fragment;
  CUTFUSE_UNROLL
  for (int i = 0; i < kFragmentSize; i += 2) {
    float2 const pair = load_pair((fragment_row(i) == 0 ? upper : lower) + fragment_column(i));
    fragment.values[i] = pair.x;
    fragment.values[i + 1] = pair.y;
  }
  return fragment;
}

template <class T>
__device__ __forceinline__ Fragment<kFragmentSize> load_fragment(Operand const& operand, FragmentPosition position) {
  T const* const first =
      static_cast<T const*>(operand.data) + position.m * operand.strides[1] + position.n * operand.strides[2];
  bool const whole = position.m + fragment_row(2) < position.rows &&
                     position.n + fragment_column(kFragmentSize - 1) < position.columns;
  bool const aligned = operand.strides[1] % 2 == 0 && reinterpret_cast<uintptr_t>(first) % (2 * sizeof(T)) == 0;
  if (operand.strides[2] == 1 && whole && aligned) {
    return load_pairs(first, operand.strides[1]);
  }
  return load_elements(first, operand, position);
}

}  // namespace detail

// The interpreter's operand loader.
struct FragmentOperands {
  Operands const* operands;
  FragmentPosition position;

  __device__ __forceinline__ Fragment<kFragmentSize> operator()(int index) const {
    Operand const& operand = operands->items[index];
    switch (operand.dtype) {
      case DType::kFloat16:
        return detail::load_fragment<__half>(operand, position);
      case DType::kBFloat16:
        return detail::load_fragment<__nv_bfloat16>(operand, position);
      default:
        return detail::load_fragment<float>(operand, position);
    }
  }
};

// What the visitor's device code reads, from a copy in shared memory: an instruction comes sooner from there than
// through a pointer to the kernel's parameters (six ops on 1024x8192x8192 bf16, H200: 223 us instead of 228).
struct alignas(16) EpilogueParams {
  Program program;
  Operands operands;
  float* partials;
  void* pre_activation;  // [rows, columns] of the operands' type, where it is stored beside the result; null elsewhere
  int rows;              // M and N: where the output matrix ends
  int columns;
  Reduction reduction;
  bool reads_source;    // the copy engine brings an operand ahead of its use: see SourceFragment
  uint8_t staged_rows;  // see StagedOperands and EpilogueStorage; 0 where nothing is staged
  uint8_t staged_columns;
  uint16_t tile_rows;
  uint16_t tile_columns;
};

// What an epilogue has in shared memory: the copy, and behind it of each staged operand the elements beside the tile.
template <int extent>
struct EpilogueStorage {
  EpilogueParams params;
  float staged[kMaxOperands][extent];
};
template <>
struct EpilogueStorage<0> {
  EpilogueParams params;
};

// The staged elements of an operand, given the copy in shared memory.
__device__ __forceinline__ float const* staged_elements(EpilogueParams const* params, int operand) {
  int const extent = params->tile_rows > params->tile_columns ? params->tile_rows : params->tile_columns;
  return reinterpret_cast<float const*>(params + 1) + operand * extent;
}

// The fragment of the operand that the copy engine brings to shared memory: a matrix as large as the result and of its
// type. Fetched for programs that are compiled into a kernel, whose text reads it; the interpreter loads all operands.
template <int words>
struct SourceFragment {
  uint32_t values[words];
};

__device__ __forceinline__ void copy_to_shared(EpilogueParams const& params, EpilogueParams* shared, int thread) {
  constexpr int kWords = sizeof(EpilogueParams) / sizeof(uint4);
  static_assert(sizeof(EpilogueParams) % sizeof(uint4) == 0 && kWords <= 128, "one word a thread of a warpgroup");
  if (thread < kWords) {
    reinterpret_cast<uint4*>(shared)[thread] = reinterpret_cast<uint4 const*>(&params)[thread];
  }
}

__device__ __forceinline__ FragmentOperands operands_at(EpilogueParams const* params, int m, int n) {
  return {&params->operands, {m, n, params->rows, params->columns}};
}

// Where z is stored; null where it is not. A kernel that has a program compiled in and stores no z has null at this
// mark (specialize/kernel_text.h): asking for each subtile takes 12608x3072x768 in bf16 4 us of 110 (H200).
__device__ __forceinline__ void* pre_activation_of(EpilogueParams const* params) {
  void* address = params->pre_activation;
  asm("mov.b64 %0, %0; // address of the pre-activation" : "+l"(address));
  return address;
}

template <class Op, class Primitives>
__device__ __forceinline__ Fragment<kFragmentSize> run_chain(Program const& program, Fragment<kFragmentSize> const& z) {
  Instruction const& instruction = program.instructions[0];
  float const p0 = instruction.immediate[0];
  float const p1 = instruction.immediate[1];
  Fragment<kFragmentSize> y;
  CUTFUSE_UNROLL
  for (int i = 0; i < kFragmentSize; ++i) {
    float const value = Op::template forward<Primitives>(z.values[i], 0.0f, 0.0f, p0, p1);
    y.values[i] = ::fmaf(value, instruction.scale, instruction.shift);
  }
  if (program.adds_input) {
    CUTFUSE_UNROLL
    for (int i = 0; i < kFragmentSize; ++i) y.values[i] += z.values[i];
  }
  return y;
}

// Keeps the source a parameter of run_epilogue where nothing reads it: a program that is compiled in may.
template <int words>
__device__ __forceinline__ void keep(SourceFragment<words> const& source) {
  CUTFUSE_UNROLL
  for (int i = 0; i < words; ++i) asm volatile("" ::"r"(source.values[i]));
}

// Not inlined: CUTLASS unrolls the loop over subtiles, and one copy of the op switch per kernel keeps it in the
// instruction cache (6-10 us on a one-wave product otherwise, H200).
template <class Primitives, class... Source>
static __device__ __noinline__ Fragment<kFragmentSize> run_epilogue(EpilogueParams const* params, int m, int n,
                                                                    Fragment<kFragmentSize> z, Source... source) {
  (keep(source), ...);
  switch (params->program.chain) {
#define CUTFUSE_CHAIN(Camel)                   \
  case static_cast<int32_t>(OpCode::k##Camel): \
    return run_chain<ops::Camel, Primitives>(params->program, z);
#include "epilogue/chains.def"
    default:
      return interpret<kFragmentSize, Primitives>(params->program, z, operands_at(params, m, n));
  }
}

// Brings the operands that are rows, columns or single elements to shared memory, once for a tile.

namespace detail {

// An element's bits as they lie in memory. Without a branch, so that the loads of all operands are in flight at once.
__device__ __forceinline__ uint32_t load_bits(void const* data, int64_t offset, bool is_wide, bool exists) {
  uint32_t bits = 0;
  if (exists && is_wide) bits = static_cast<uint32_t const*>(data)[offset];
  if (exists && !is_wide) bits = static_cast<uint16_t const*>(data)[offset];
  return bits;
}

__device__ __forceinline__ float element_of_bits(uint32_t bits, DType dtype) {
  float const from_half = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  float const wide = __uint_as_float(dtype == DType::kBFloat16 ? bits << 16 : bits);
  return dtype == DType::kFloat16 ? from_half : wide;
}

}  // namespace detail

// Elements outside the matrix are 0. The kernel's text says by the mark that it stages operands (see
// specialize/kernel_text.h): behind an instruction, as lines of comments alone are left out of embedded text.
template <int threads, int extent>
__device__ __forceinline__ void stage_operands(EpilogueParams const& params, EpilogueStorage<extent>& storage,
                                               int tile_m, int tile_n, int thread) {
  uint32_t rows = params.staged_rows;
  uint32_t const columns = params.staged_columns;
  asm volatile("mov.b32 %0, %0; // operands are staged" : "+r"(rows));
  if (rows == 0 && columns == 0) return;
  constexpr int kElements = (extent + threads - 1) / threads;
  uint32_t bits[kMaxOperands][kElements];
  CUTFUSE_UNROLL
  for (int k = 0; k < kMaxOperands; ++k) {
    Operand const& operand = params.operands.items[k];
    bool const is_row = (rows >> k & 1) != 0;
    bool const is_column = (columns >> k & 1) != 0;
    int const size = is_row ? params.tile_columns : params.tile_rows;
    int const first = (is_row ? tile_n : tile_m) * size;
    int const count = min(size, (is_row ? params.columns : params.rows) - first);
    int64_t const stride = operand.strides[is_row ? 2 : 1];
    CUTFUSE_UNROLL
    for (int j = 0; j < kElements; ++j) {
      int const i = thread + j * threads;
      bool const exists = (is_row || is_column) && i < count;
      bits[k][j] = detail::load_bits(operand.data, (first + i) * stride, operand.dtype == DType::kFloat32, exists);
    }
  }
  CUTFUSE_UNROLL
  for (int k = 0; k < kMaxOperands; ++k) {
    CUTFUSE_UNROLL
    for (int j = 0; j < kElements; ++j) {
      int const i = thread + j * threads;
      if (i < extent) storage.staged[k][i] = detail::element_of_bits(bits[k][j], params.operands.items[k].dtype);
    }
  }
}

}  // namespace cutfuse::sm90
