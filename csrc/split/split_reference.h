// The splitting kernels on the host: what they compute, on a machine without a GPU or CUDA's headers.
#pragma once

#include <cstdint>

namespace cutfuse {

// Splits a contiguous matrix to planes as in planes.h, of fp16 (2 parts) or bf16 (3 parts), and returns the flags of a
// kernel in which one thread block takes the whole matrix.
uint32_t split_reference(float const* source, int64_t rows, int64_t columns, int parts, uint16_t* values,
                         float* scales);

}  // namespace cutfuse
