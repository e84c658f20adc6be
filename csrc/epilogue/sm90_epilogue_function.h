// What the epilogue of every sm_90 GEMM calls for a fragment: the function that runs the program, and what it reads.
// Apart from the visitor and its CUTLASS headers, so that the snippets of specialize/ are compiled against the same.
#pragma once

#include "epilogue/interpreter.h"
#include "epilogue/program.h"
#include "epilogue/sm90_fragment_operands.h"
#include "reduce/reduction.h"

namespace cutfuse::sm90 {

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

}  // namespace cutfuse::sm90
