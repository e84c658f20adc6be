// Division that rounds up.
#pragma once

#include <cstdint>

namespace cutfuse {

constexpr int64_t ceil_divide(int64_t x, int64_t y) { return (x + y - 1) / y; }

constexpr int64_t round_up(int64_t x, int64_t multiple) { return ceil_divide(x, multiple) * multiple; }

}  // namespace cutfuse
