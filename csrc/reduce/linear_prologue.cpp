#include "reduce/linear_prologue.h"

#include "epilogue/ops.h"

namespace cutfuse {
namespace {

bool is_number(uint8_t source) { return source == kImmediate0 || source == kImmediate1; }

// The source that the previous result is multiplied by; kPrevious if the instruction is anything else.
uint8_t find_factor(Instruction const& instruction, bool first) {
  if (static_cast<OpCode>(instruction.op) != OpCode::kMul || instruction.slot != kNoSlot) return kPrevious;
  auto const is_chain = [&](uint8_t source) { return source == kPrevious || (first && source == kInput); };
  auto const is_factor = [](uint8_t source) { return is_number(source) || source >= kOperand0; };
  if (is_chain(instruction.a) && is_factor(instruction.b)) return instruction.b;
  if (is_chain(instruction.b) && is_factor(instruction.a)) return instruction.a;
  return kPrevious;
}

}  // namespace

LinearPrologue find_linear_prologue(Program const& program) {
  LinearPrologue prologue = {true, 1.0f, -1};
  for (int index = 0; index < program.length; ++index) {
    Instruction const& instruction = program.instructions[index];
    uint8_t const factor = find_factor(instruction, index == 0);
    if (is_number(factor)) {
      prologue.scale *= instruction.immediate[factor - kImmediate0];
    } else if (factor >= kOperand0 && prologue.weight < 0) {
      prologue.weight = factor - kOperand0;
    } else {
      return {false, 1.0f, -1};
    }
    if (instruction.shift != 0.0f) return {false, 1.0f, -1};
    prologue.scale *= instruction.scale;
  }
  return prologue;
}

}  // namespace cutfuse
