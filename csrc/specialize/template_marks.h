// The marks that kernels of several *_templates.cu have: asm statements in the place of a program, which
// marked_kernel.h reads. See pointwise_templates.cu.
#pragma once

#include <cstddef>
#include <type_traits>

#include "common/vector_access.h"
#include "pointwise/kernels.h"

namespace cutfuse {

// The offsets of what a program reads in the kernel's parameters, elements of a piece, pieces, and whether primitives
// are the fast ones.
template <class Parameters, class T, int pieces>
__device__ __forceinline__ void mark_layout() {
  asm volatile("cutfuse.layout %0, %1, %2, %3, %4;" ::"n"(offsetof(Parameters, program)),
               "n"(offsetof(Parameters, operands)), "n"(kVectorSize<T>), "n"(pieces),
               "n"(std::is_same_v<PrimitivesFor<T>, FastPrimitives> ? 1 : 0));
}

// Has the operands loaded: the first piece at `at`, the second so many columns behind it.
__device__ __forceinline__ void mark_load(VectorPosition const& at, int second) {
  asm volatile("cutfuse.load %0, %1, %2, {0, %3};" ::"l"(at.outer), "l"(at.row), "l"(at.column), "r"(second));
}

// A mark with a number, behind which a thread's values of a piece, 4 or 8, are others.
#define CUTFUSE_MARK_VALUES(opcode, elements, values, number)                                                     \
  if constexpr ((elements) == 4) {                                                                                \
    asm volatile(opcode " %4, {%0, %1, %2, %3};"                                                                  \
                 : "+f"((values)[0]), "+f"((values)[1]), "+f"((values)[2]), "+f"((values)[3])                     \
                 : "n"(number));                                                                                  \
  } else {                                                                                                        \
    static_assert((elements) == 8, "a mark names each element");                                                  \
    asm volatile(opcode " %8, {%0, %1, %2, %3, %4, %5, %6, %7};"                                                  \
                 : "+f"((values)[0]), "+f"((values)[1]), "+f"((values)[2]), "+f"((values)[3]), "+f"((values)[4]), \
                   "+f"((values)[5]), "+f"((values)[6]), "+f"((values)[7])                                        \
                 : "n"(number));                                                                                  \
  }

// Has a piece computed in place.
template <int piece, int elements>
__device__ __forceinline__ void mark_compute(float* values) {
  CUTFUSE_MARK_VALUES("cutfuse.compute", elements, values, piece)
}

// Has gradients multiplied by derivative `w` of the piece that was differentiated last.
template <int w, int elements>
__device__ __forceinline__ void mark_derivative(float* values) {
  CUTFUSE_MARK_VALUES("cutfuse.derivative", elements, values, w)
}

#undef CUTFUSE_MARK_VALUES

}  // namespace cutfuse
