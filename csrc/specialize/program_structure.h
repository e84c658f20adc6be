// What of a program is compiled into a specialized kernel: everything but its numbers.
#pragma once

#include <string>

#include "epilogue/program.h"
#include "specialize/operand_types.h"

namespace cutfuse::specialize {

// Bytes that are equal for prepared programs which the same compiled code runs.
std::string structure_of(Program const& program, OperandTypes const& types);

}  // namespace cutfuse::specialize
