#include "specialize/vector_program.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "epilogue/ops.h"
#include "specialize/ptx_text.h"

namespace cutfuse::specialize {
namespace {

// Instructions of PTX up to which the program is written once for each element of a thread. Longer ones are written for
// a pass of elements, in a loop through whose first registers each piece is rotated: see epilogue_function.cpp.
constexpr int kMostStraightLine = 2400;

}  // namespace

VectorProgram::VectorProgram(MarkedLayout const& layout, std::string parameter, Program const& program,
                             OperandTypes const& operands, OpSnippets const& snippets,
                             std::unique_ptr<ProgramWriter> writer)
    : layout_(layout),
      parameter_(std::move(parameter)),
      program_(program),
      owned_(std::move(writer)),
      writer_(*owned_),
      loads_(layout, parameter_, program, operands, snippets, writer_) {}

VectorProgram::VectorProgram(MarkedLayout const& layout, std::string const& parameter, Program const& program,
                             OperandTypes const& operands, OpSnippets const& snippets)
    : VectorProgram(
          layout, parameter, program, operands, snippets,
          std::make_unique<ProgramWriter>(program, snippets, layout.primitives, layout.program_address(parameter))) {}

std::string VectorProgram::write(Mark const& mark) {
  if (mark.opcode == "cutfuse.layout") {
    declare();
  } else if (!loads_.write(mark) && !write_program(mark)) {
    throw std::invalid_argument("the kernel's PTX has an unknown mark " + mark.opcode);
  }
  return writer_.take_text();
}

bool VectorProgram::write_program(Mark const& mark) {
  if (mark.opcode != "cutfuse.compute") return false;
  compute(mark);
  return true;
}

bool VectorProgram::is_short() const {
  return element_instructions() * layout_.elements * layout_.pieces <= kMostStraightLine;
}

int VectorProgram::blocks(int threads) const {
  constexpr int kRegisters = 65536;  // of a multiprocessor
  constexpr int kOfLongOps = 16;     // erfc of two elements at once: spills without them
  constexpr int kLongOp = 64;        // instructions
  int held = layout_.registers + own_registers() + (longest_snippet() > kLongOp ? kOfLongOps : 0);
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand)) continue;
    held += loads_.registers_of(operand);
    if (!is_short()) held += layout_.elements;
  }
  return std::max(1, kRegisters / (threads * held));
}

void VectorProgram::declare_program() {
  writer_.declare(layout_.elements, layout_.elements, is_short() ? layout_.elements : kPass);
}

void VectorProgram::declare() {
  declare_program();
  writer_.line(".reg .b32 %passes;");
  writer_.line(".reg .pred %more;");
  loads_.declare();
  // All numbers: they are in the constant bank, from which an instruction takes its argument without a register.
  writer_.load_numbers(writer_.number_count());
}

void VectorProgram::take_input(std::string const* values, int piece) {
  for (int i = 0; i < layout_.elements; ++i) writer_.move(element(kInputRegisters, i), values[i]);
  loads_.unpack(piece);
}

void VectorProgram::compute(Mark const& mark) {
  int const elements = layout_.elements;
  if (mark.arguments.size() != 1 + static_cast<size_t>(elements)) {
    throw std::invalid_argument("the kernel's PTX has a cutfuse.compute of another length than its pieces");
  }
  int const piece = std::stoi(mark.arguments[0]);
  std::string const* const values = &mark.arguments[1];
  take_input(values, piece);
  if (is_short()) {
    for (int i = 0; i < elements; ++i) writer_.write_element(i);
  } else {
    write_passes();
  }
  std::string const results = is_short() ? writer_.results() : kInputRegisters;
  for (int i = 0; i < elements; ++i) writer_.move(values[i], element(results, i));
}

// Gives the loop's label.
std::string VectorProgram::begin_passes() {
  std::string const label = "$Lpass" + std::to_string(loops_++);
  // A constant that ptxas cannot see, as there is no negative number of operands: it unrolls a loop whose count it
  // knows.
  size_t const count = static_cast<size_t>(layout_.program) + offsetof(Program, operand_count);
  writer_.line("ld.param.s32 %passes, [" + parameter_ + "+" + std::to_string(count) + "];");
  writer_.line("shr.s32 %passes, %passes, 31;");
  writer_.line("add.s32 %passes, %passes, " + std::to_string(layout_.elements / kPass) + ";");
  writer_.label(label);
  writer_.line(std::string(kKeptLoop));
  for (int i = 0; i < kPass; ++i) writer_.write_element(i);
  return label;
}

void VectorProgram::end_passes(std::string const& label) {
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand)) writer_.rotate(operand_registers(operand), layout_.elements, kPass);
  }
  writer_.line("add.s32 %passes, %passes, -1;");
  writer_.line("setp.gt.s32 %more, %passes, 0;");
  writer_.line("@%more bra " + label + ";");
}

void VectorProgram::write_passes() {
  int const elements = layout_.elements;
  std::string const label = begin_passes();
  writer_.rotate(kInputRegisters, elements, kPass);
  for (int i = 0; i < kPass; ++i) {
    writer_.move(element(kInputRegisters, elements - kPass + i), element(writer_.results(), i));
  }
  end_passes(label);
}

}  // namespace cutfuse::specialize
