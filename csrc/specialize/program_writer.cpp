#include "specialize/program_writer.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "epilogue/ops.h"

namespace cutfuse::specialize {
namespace {

// The numbers of an instruction that its op or its step reads.
enum Number : int { kFirstImmediate, kSecondImmediate, kScale, kShift, kNumbers };

constexpr std::array<size_t, kNumbers> kNumberOffsets = {offsetof(Instruction, immediate),
                                                         offsetof(Instruction, immediate) + sizeof(float),
                                                         offsetof(Instruction, scale), offsetof(Instruction, shift)};

std::string value_registers(int instruction) { return "%value" + std::to_string(instruction) + "_"; }

std::string number_registers(int instruction) { return "%number" + std::to_string(instruction) + "_"; }

std::string number(int index, int k) { return element(number_registers(index), k); }

int operand_of(int source) { return source - kOperand0; }

std::vector<int> operands_read_by(Program const& program) {
  std::set<int> operands;
  for (int index = 0; index < program.length; ++index) {
    Instruction const& instruction = program.instructions[index];
    for (int argument = 0; argument < kOps[instruction.op].arity; ++argument) {
      int const source = argument_source(instruction, argument);
      if (is_operand(source)) operands.insert(operand_of(source));
    }
  }
  return {operands.begin(), operands.end()};
}

}  // namespace

int argument_source(Instruction const& instruction, int argument) {
  if (argument == 0) return instruction.a;
  return argument == 1 ? instruction.b : instruction.c;
}

std::string add_new(std::vector<std::string>& list, std::string const& item) {
  if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
  return item;
}

std::string element(std::string const& registers, int i) { return registers + std::to_string(i); }

std::vector<std::string> elements(std::string const& registers, int first, int count) {
  std::vector<std::string> names;
  names.reserve(count);
  for (int i = 0; i < count; ++i) names.push_back(element(registers, first + i));
  return names;
}

std::string operand_registers(int operand) { return "%operand" + std::to_string(operand) + "_"; }

ProgramWriter::ProgramWriter(Program const& program, OpSnippets const& snippets, Primitives primitives,
                             ProgramAddress address)
    : program_(program),
      snippets_(snippets),
      primitives_(primitives),
      address_(std::move(address)),
      operands_read_(operands_read_by(program)) {}

Snippet const& ProgramWriter::snippet_of(int index) const {
  Instruction const& instruction = program_.instructions[index];
  return instruction.is_eager != 0 ? snippets_.eager_op(instruction.op) : snippets_.op(instruction.op, primitives_);
}

int ProgramWriter::instructions() const {
  int count = 0;
  for (int index = 0; index < program_.length; ++index) count += snippet_of(index).instructions;
  return count;
}

int ProgramWriter::longest_op() const {
  int longest = 0;
  for (int index = 0; index < program_.length; ++index) longest = std::max(longest, snippet_of(index).instructions);
  return longest;
}

int ProgramWriter::number_count() const {
  int count = 0;
  for (int index = 0; index < program_.length; ++index) {
    for (int number = 0; number < kNumbers; ++number) count += reads_number(index, number) ? 1 : 0;
  }
  return count;
}

bool ProgramWriter::reads_number(int index, int number) const {
  Instruction const& instruction = program_.instructions[index];
  if (number >= kScale) return multiplies_and_adds(index);
  if (number < kOps[instruction.op].parameter_count) return true;
  for (int argument = 0; argument < kOps[instruction.op].arity; ++argument) {
    int const source = argument_source(instruction, argument);
    if (is_immediate(source) && source - kImmediate0 == number) return true;
  }
  return false;
}

// run_chain makes this multiply-add whatever the numbers are, which makes every NaN the same one.
bool ProgramWriter::multiplies_and_adds(int index) const {
  bool const is_chain = program_.chain != kNoChain && index == 0;
  return is_chain || (program_.instructions[index].steps & kScaleShift) != 0;
}

void ProgramWriter::declare_floats(std::string const& registers, int count) {
  line(".reg .f32 " + registers + "<" + std::to_string(count) + ">;");
}

void ProgramWriter::declare(int inputs, int operands, int elements) {
  declare_floats(kInputRegisters, inputs);
  for (int const operand : operands_read_) {
    declare_floats(operand_registers(operand), distinct_elements(kinds_[operand], operands));
  }
  std::vector<Snippet const*> snippets;
  for (int index = 0; index < program_.length; ++index) {
    declare_floats(value_registers(index), elements);
    declare_floats(number_registers(index), kNumbers);
    snippets.push_back(&snippet_of(index));
  }
  declare_needs(snippets);
}

void ProgramWriter::declare_needs(std::vector<Snippet const*> const& snippets) {
  std::vector<std::string> locals;
  for (Snippet const* snippet : snippets) {
    for (std::string const& local : snippet->locals) add_new(locals, local);
    for (std::string const& global : snippet->globals) add_new(written_.globals, global);
  }
  for (std::string const& local : locals) line(local);
}

std::string ProgramWriter::scale_of(int index) const { return number(index, kScale); }

std::string ProgramWriter::value_of(int index, int i) const { return element(value_registers(index), i); }

// The program's numbers come from the kernel's parameters, so that one kernel serves programs that differ in numbers
// alone. It also keeps from ptxas what a number is: it would compute approximations of one itself, and not as the GPU
// does (sigmoid of 1.5 leaves no MUFU).
void ProgramWriter::load_number(int index, int which) {
  size_t const instruction = address_.offset + offsetof(Program, instructions) + sizeof(Instruction) * index;
  line("ld" + address_.space + ".f32 " + number(index, which) + ", [" + address_.base + "+" +
       std::to_string(instruction + kNumberOffsets[which]) + "];");
}

void ProgramWriter::load_numbers_of(int index) {
  for (int which = 0; which < kNumbers; ++which) {
    if (reads_number(index, which)) load_number(index, which);
  }
}

void ProgramWriter::load_numbers(int room) {
  for (resident_end_ = 0; resident_end_ < program_.length; ++resident_end_) {
    for (int which = 0; which < kNumbers; ++which) room -= reads_number(resident_end_, which) ? 1 : 0;
    if (room < 0) return;
    load_numbers_of(resident_end_);
  }
}

// Where element i of an argument is: a register, or a number.
std::string ProgramWriter::argument_at(int index, int source, int i) const {
  if (source >= kOperand0) {
    int const operand = operand_of(source);
    return element(operand_registers(operand), distinct_element(kinds_[operand], i));
  }
  if (source >= kSlot0) return element(value_registers(slots_[source - kSlot0]), i);
  if (source == kImmediate0 || source == kImmediate1) return number(index, source - kImmediate0);
  bool const is_input = source == kInput || index == 0;
  return element(is_input ? kInputRegisters : value_registers(index - 1), i);
}

void ProgramWriter::write_instruction(int index, int i) {
  Instruction const& instruction = program_.instructions[index];
  if (index >= resident_end_) load_numbers_of(index);
  std::vector<std::string> arguments(3);
  for (int argument = 0; argument < kOps[instruction.op].arity; ++argument) {
    arguments[argument] = argument_at(index, argument_source(instruction, argument), i);
  }
  arguments.push_back(number(index, kFirstImmediate));
  arguments.push_back(number(index, kSecondImmediate));
  std::string const result = element(value_registers(index), i);
  add(snippet_of(index), arguments, {result});
  after_op(index, i, arguments);
  if (multiplies_and_adds(index)) {
    line("fma.rn.f32 " + result + ", " + result + ", " + number(index, kScale) + ", " + number(index, kShift) + ";");
  }
}

void ProgramWriter::write_element(int i) {
  for (int index = 0; index < program_.length; ++index) {
    write_instruction(index, i);
    uint8_t const slot = program_.instructions[index].slot;
    if (slot != kNoSlot) slots_[slot] = index;
  }
}

std::string ProgramWriter::results() const {
  return program_.length > 0 ? value_registers(program_.length - 1) : kInputRegisters;
}

void ProgramWriter::add(Snippet const& snippet, std::vector<std::string> const& arguments,
                        std::vector<std::string> const& results) {
  paste(snippet, arguments, results, copies_++, written_.text);
}

void ProgramWriter::rotate(std::string const& registers, int count, int by) {
  for (int i = 0; i + by < count; ++i) move(element(registers, i), element(registers, i + by));
}

}  // namespace cutfuse::specialize
