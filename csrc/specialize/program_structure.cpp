#include "specialize/program_structure.h"

namespace cutfuse::specialize {

std::string structure_of(Program const& program, OperandTypes const& types) {
  std::string bytes;
  auto const add = [&](int value) { bytes += static_cast<char>(value); };
  add(program.length);
  add(program.chain);
  add(program.operand_count);
  for (int k = 0; k < program.operand_count; ++k) {
    add(static_cast<int>(types[k].dtype));
    add(static_cast<int>(types[k].kind));
  }
  for (int index = 0; index < program.length; ++index) {
    Instruction const& instruction = program.instructions[index];
    for (int const part : {instruction.op, instruction.a, instruction.b, instruction.c, instruction.slot}) add(part);
    add(instruction.steps & kScaleShift);
  }
  return bytes;
}

}  // namespace cutfuse::specialize
