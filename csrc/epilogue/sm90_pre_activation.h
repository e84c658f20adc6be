// Stores the pre-activation z beside the result of a fused GEMM: what a backward pass differentiates the program at.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "epilogue/sm90_epilogue_function.h"

namespace cutfuse::sm90 {

// Where z is stored; null where it is not. A kernel that has a program compiled in and stores no z has null at this
// mark (specialize/kernel_text.h): asking for each subtile takes 12608x3072x768 in bf16 4 us of 110 (H200).
__device__ __forceinline__ void* pre_activation_of(EpilogueParams const* params) {
  void* address = params->pre_activation;
  asm("mov.b64 %0, %0; // address of the pre-activation" : "+l"(address));
  return address;
}

// The four lanes that share rows hold two neighbouring columns of each group of eight. Afterwards lane k holds all
// eight columns of group k: words[j] of lane k and words[k] of lane j change places.
__device__ __forceinline__ void transpose_among_lanes(uint32_t (&words)[kLanesPerRow], int lane) {
  CUTFUSE_UNROLL
  for (int distance = 1; distance < kLanesPerRow; distance *= 2) {
    bool const upper = (lane & distance) != 0;
    CUTFUSE_UNROLL
    for (int j = 0; j < kLanesPerRow; ++j) {
      if ((j & distance) != 0) continue;
      uint32_t const sent = upper ? words[j] : words[j + distance];
      uint32_t const received = __shfl_xor_sync(0xffffffff, sent, distance);
      (upper ? words[j] : words[j + distance]) = received;
    }
  }
}

// Sixteen bytes a lane: the lanes of a row write 64 bytes of it, two whole sectors.
template <class Element>
__device__ __forceinline__ void store_pre_activation_words(EpilogueParams const* params, int m, int n,
                                                           uint32_t const (&words)[kFragmentSize / 2]) {
  int const lane = static_cast<int>(threadIdx.x) % kLanesPerRow;
  int const column = n + (kColumnsPerGroup - 2) * lane;
  CUTFUSE_UNROLL
  for (int row = 0; row < kRowsPerFragment; ++row) {
    uint32_t own[kLanesPerRow];
    CUTFUSE_UNROLL
    for (int group = 0; group < kLanesPerRow; ++group) own[group] = words[group * kRowsPerFragment + row];
    transpose_among_lanes(own, lane);
    int const own_row = m + fragment_row(row * 2);
    if (own_row < params->rows && column < params->columns) {
      Element* const first = static_cast<Element*>(params->pre_activation);
      int64_t const offset = static_cast<int64_t>(own_row) * params->columns + column;
      *reinterpret_cast<uint4*>(first + offset) = make_uint4(own[0], own[1], own[2], own[3]);
    }
  }
}

// The lanes of a row write 32 bytes of it at a time, one whole sector.
__device__ __forceinline__ void store_pre_activation_pairs(EpilogueParams const* params, int m, int n,
                                                           Fragment<kFragmentSize> const& z) {
  CUTFUSE_UNROLL
  for (int i = 0; i < kFragmentSize; i += 2) {
    int const row = m + fragment_row(i);
    int const column = n + fragment_column(i);
    if (row < params->rows && column < params->columns) {
      float* const first = static_cast<float*>(params->pre_activation);
      *reinterpret_cast<float2*>(first + static_cast<int64_t>(row) * params->columns + column) =
          make_float2(z.values[i], z.values[i + 1]);
    }
  }
}

// Rows begin at multiples of 16 bytes: see find_rejection. Not inlined, for the reason that run_epilogue is not.
template <class Element>
static __device__ __noinline__ void store_pre_activation(EpilogueParams const* params, int m, int n,
                                                         Fragment<kFragmentSize> z) {
  if constexpr (sizeof(Element) == sizeof(float)) {
    store_pre_activation_pairs(params, m, n, z);
  } else {
    using Pair = cutlass::Array<Element, 2>;
    static_assert(sizeof(Pair) == sizeof(uint32_t));
    uint32_t words[kFragmentSize / 2];
    CUTFUSE_UNROLL
    for (int i = 0; i < kFragmentSize; i += 2) {
      cutlass::Array<float, 2> const values = {z.values[i], z.values[i + 1]};
      Pair const rounded = cutlass::NumericArrayConverter<Element, float, 2>{}(values);
      words[i / 2] = reinterpret_cast<uint32_t const&>(rounded);
    }
    store_pre_activation_words<Element>(params, m, n, words);
  }
}

}  // namespace cutfuse::sm90
