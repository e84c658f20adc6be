// The types of a program's operands, which a specialized program has compiled in.
#pragma once

#include <array>

#include "common/dtype.h"
#include "epilogue/program.h"

namespace cutfuse::specialize {

using OperandTypes = std::array<DType, kMaxOperands>;

}  // namespace cutfuse::specialize
