// The splitting kernels on the host: what they compute, on a machine without a GPU or CUDA's headers.
#pragma once

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {

// Splits a contiguous matrix to planes as in planes.h, and returns the flags of a kernel in which one thread block
// takes the whole matrix.
uint32_t split_reference(float const* source, int64_t rows, int64_t columns, SplitPlan plan, bool is_weight,
                         uint16_t* values, float* scales);

}  // namespace cutfuse
