// What the splitting kernels compute, on the host. It needs no GPU and no CUDA header.
#pragma once

#include <cstdint>

#include "split/planes.h"

namespace cutfuse {

// Splits a contiguous matrix into planes (see planes.h). Returns the flag word that a kernel with a single thread block
// would write.
uint32_t split_reference(float const* source, int64_t rows, int64_t columns, SplitScheme scheme, bool is_weight,
                         uint16_t* values, float* scales);

}  // namespace cutfuse
