// Division that rounds up, and, for kernels that count in 32 bits, by a number that the host knows, which costs a
// kernel two instructions in place of eighteen.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace cutfuse {

constexpr int64_t ceil_divide(int64_t x, int64_t y) { return (x + y - 1) / y; }

constexpr int64_t round_up(int64_t x, int64_t multiple) { return ceil_divide(x, multiple) * multiple; }

// The most that kernels count in 32 bits, which go past it by less than a block.
inline constexpr int64_t kMostCounted = int64_t{1} << 30;

struct Divisor {
  uint32_t multiplier;  // 2^shift / divisor, rounded up
  int32_t shift;
};

// For divisors of 1 to 2^31 - 1; a larger one gives anything. The power of 2 behind `shift` is 2^31 times one that no
// divisor exceeds, so rounding the multiplier up adds less than 1 / divisor to the quotient of any number below 2^31.
constexpr Divisor divisor_of(int64_t divisor) {
  int32_t shift = 31;
  while (shift < 62 && (int64_t{1} << (shift - 31)) < divisor) ++shift;
  uint64_t const power = uint64_t{1} << shift;
  return {static_cast<uint32_t>((power + static_cast<uint64_t>(divisor) - 1) / static_cast<uint64_t>(divisor)), shift};
}

// Of a number below 2^31.
CUTFUSE_HOST_DEVICE constexpr uint32_t divide_by(uint32_t x, Divisor divisor) {
  return static_cast<uint32_t>(static_cast<uint64_t>(x) * divisor.multiplier >> divisor.shift);
}

}  // namespace cutfuse
