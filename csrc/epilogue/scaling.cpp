#include "epilogue/scaling.h"

#include <cmath>

#include "epilogue/ops.h"

namespace cutfuse {
namespace {

constexpr Scaling kNoScaling = {false, 1.0f, -1};

bool multiply(Scaling& scaling, float number) {
  scaling.scale *= number;
  return std::isnormal(scaling.scale);
}

// Takes an instruction in, if it multiplies the previous result. A shift by +0 is none to a sum, which starts from it.
bool take(Scaling& scaling, Instruction const& instruction) {
  if (static_cast<OpCode>(instruction.op) != OpCode::kMul || instruction.slot != kNoSlot) return false;
  if (instruction.shift != 0.0f || !multiply(scaling, instruction.scale)) return false;
  uint8_t const factor = partner_of_previous(instruction);
  if (is_immediate(factor)) return multiply(scaling, number_of(instruction, factor));
  if (!is_operand(factor) || scaling.weight >= 0) return false;
  scaling.weight = factor - kOperand0;
  return true;
}

}  // namespace

Scaling find_scaling(Program const& program) {
  Scaling scaling = {true, 1.0f, -1};
  for (int index = 0; index < program.length; ++index) {
    if (!take(scaling, program.instructions[index])) return kNoScaling;
  }
  return scaling;
}

}  // namespace cutfuse
