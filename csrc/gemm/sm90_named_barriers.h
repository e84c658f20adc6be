// The named barriers of a product over planes, of which a block has few: no two uses may share one.
#pragma once

#include <cstdint>

namespace cutfuse {
namespace sm90 {

constexpr uint32_t kConsumersBarrier = 0;
constexpr uint32_t kConvertersBarrier = 1;
constexpr uint32_t kFirstTurnBarrier = 2;  // and 3: one for each warpgroup of consumers

}  // namespace sm90
}  // namespace cutfuse
