#include "specialize/epilogue_function.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "epilogue/ops.h"

namespace cutfuse::specialize {
namespace {

// Instructions of PTX, and operands, up to which the program is written once for each element. Longer ones are written
// for a pass of elements, in a loop through whose first registers the fragment is rotated: ptxas takes time in
// proportion to the text, and what a small product waits for is the first fetch of the code. Fragments of four operands
// spill in a kernel with a tile of 128x256.
constexpr int kMostStraightLine = 2400;
constexpr int kMostFragments = 3;
// Numbers that stay in registers throughout, of a program written for each element and of one written for passes; a
// fragment of an operand takes the place of as many as it has elements.
constexpr int kMostNumbers = 48;
constexpr int kMostNumbersOfPasses = 16;

// The numbers of an instruction that its op or its step reads.
enum Number : int { kFirstImmediate, kSecondImmediate, kScale, kShift, kNumbers };

constexpr std::array<size_t, kNumbers> kNumberOffsets = {offsetof(Instruction, immediate),
                                                         offsetof(Instruction, immediate) + sizeof(float),
                                                         offsetof(Instruction, scale), offsetof(Instruction, shift)};

std::string element(std::string const& registers, int i) { return registers + std::to_string(i); }

std::string operand_registers(int operand) { return "%operand" + std::to_string(operand) + "_"; }

std::string value_registers(int instruction) { return "%value" + std::to_string(instruction) + "_"; }

std::string number_registers(int instruction) { return "%number" + std::to_string(instruction) + "_"; }

int operand_of(int source) { return source - kOperand0; }

int argument_source(Instruction const& instruction, int argument) {
  if (argument == 0) return instruction.a;
  return argument == 1 ? instruction.b : instruction.c;
}

class BodyWriter {
 public:
  BodyWriter(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
             EpilogueSignature const& signature)
      : program_(program), operands_(operands), snippets_(snippets), signature_(signature) {}

  EpilogueBody write() {
    elements_ = is_short() ? kFragment : kPass;
    declare();
    read_parameters();
    load_resident_numbers();
    if (elements_ == kFragment) {
      load_operands();
      for (int i = 0; i < kFragment; ++i) write_element(i);
      return_fragment(program_.length > 0 ? value_registers(program_.length - 1) : "%z_");
    } else {
      write_passes();
      return_fragment("%z_");
    }
    return std::move(body_);
  }

 private:
  Snippet const& snippet_of(int index) const {
    return snippets_.op(program_.instructions[index].op, signature_.primitives);
  }

  bool is_short() const {
    int instructions = 0;
    for (int index = 0; index < program_.length; ++index) instructions += snippet_of(index).instructions;
    int operands = 0;
    for (int operand = 0; operand < program_.operand_count; ++operand) operands += reads_operand(operand) ? 1 : 0;
    return instructions * kFragment <= kMostStraightLine && operands <= kMostFragments &&
           number_count() + operands * kFragment <= kMostNumbers;
  }

  bool reads_number(int index, int number) const {
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
  bool multiplies_and_adds(int index) const {
    bool const is_chain = program_.chain != kNoChain && index == 0;
    return is_chain || (program_.instructions[index].steps & kScaleShift) != 0;
  }

  int number_count() const {
    int count = 0;
    for (int index = 0; index < program_.length; ++index) {
      for (int number = 0; number < kNumbers; ++number) count += reads_number(index, number) ? 1 : 0;
    }
    return count;
  }

  bool reads_operand(int operand) const {
    for (int index = 0; index < program_.length; ++index) {
      Instruction const& instruction = program_.instructions[index];
      for (int argument = 0; argument < kOps[instruction.op].arity; ++argument) {
        if (operand_of(argument_source(instruction, argument)) == operand) return true;
      }
    }
    return false;
  }

  void line(std::string const& text) { body_.text += "\t" + text + "\n"; }

  void declare_floats(std::string const& registers, int count) {
    line(".reg .f32 " + registers + "<" + std::to_string(count) + ">;");
  }

  void declare() {
    line(".reg .b64 %params;");
    line(".reg .b32 %m;");
    line(".reg .b32 %n;");
    declare_floats("%z_", kFragment);
    for (int operand = 0; operand < program_.operand_count; ++operand) {
      if (reads_operand(operand)) declare_floats(operand_registers(operand), elements_);
    }
    std::vector<std::string> locals;
    for (int index = 0; index < program_.length; ++index) {
      declare_floats(value_registers(index), elements_);
      declare_floats(number_registers(index), kNumbers);
      Snippet const& snippet = snippet_of(index);
      add_new(locals, snippet.locals);
      add_new(body_.globals, snippet.globals);
    }
    for (std::string const& local : locals) line(local);
  }

  static void add_new(std::vector<std::string>& list, std::vector<std::string> const& more) {
    for (std::string const& item : more) {
      if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
    }
  }

  std::string parameter(int index) const { return signature_.name + "_param_" + std::to_string(index); }

  void read_parameters() {
    line("ld.param.u64 %params, [" + parameter(0) + "];");
    line("ld.param.u32 %m, [" + parameter(1) + "];");
    line("ld.param.u32 %n, [" + parameter(2) + "];");
    for (int i = 0; i < kFragment; ++i) {
      line("ld.param.f32 " + element("%z_", i) + ", [" + parameter(3) + "+" + std::to_string(4 * i) + "];");
    }
  }

  // The program's numbers come from the kernel's parameters, so that one kernel serves programs that differ in numbers
  // alone. It also keeps from ptxas what a number is: it would compute approximations of one itself, and not as the GPU
  // does (sigmoid of 1.5 leaves no MUFU).
  void load_number(int index, int number) {
    size_t const instruction = offsetof(Program, instructions) + sizeof(Instruction) * index;
    line("ld.f32 " + element(number_registers(index), number) + ", [%params+" +
         std::to_string(instruction + kNumberOffsets[number]) + "];");
  }

  void load_numbers(int index) {
    for (int number = 0; number < kNumbers; ++number) {
      if (reads_number(index, number)) load_number(index, number);
    }
  }

  // Those that are loaded before anything is computed; others are where they are read.
  void load_resident_numbers() {
    int room = elements_ == kFragment ? kMostNumbers : kMostNumbersOfPasses;
    for (resident_end_ = 0; resident_end_ < program_.length; ++resident_end_) {
      for (int number = 0; number < kNumbers; ++number) room -= reads_number(resident_end_, number) ? 1 : 0;
      if (room < 0) return;
      load_numbers(resident_end_);
    }
  }

  static std::string number(int index, int k) { return element(number_registers(index), k); }

  // Each operand once, before anything is computed, so that the loads of all of them are on their way together: of the
  // fragment, or of one pass.
  void load_operands() {
    for (int operand = 0; operand < program_.operand_count; ++operand) {
      if (!reads_operand(operand)) continue;
      std::vector<std::string> results;
      results.reserve(elements_);
      for (int i = 0; i < elements_; ++i) results.push_back(element(operand_registers(operand), i));
      DType const dtype = operands_[operand];
      Snippet const& load = elements_ == kFragment ? snippets_.load_operand(dtype) : snippets_.load_group(dtype);
      paste(load, {"%params", "%m", "%n", std::to_string(operand)}, results, copies_++, body_.text);
    }
  }

  // Where element i of an argument is: a register, or a number.
  std::string argument_at(int index, int source, int i) const {
    if (source >= kOperand0) return element(operand_registers(operand_of(source)), i);
    if (source >= kSlot0) return element(value_registers(slots_[source - kSlot0]), i);
    if (source == kImmediate0 || source == kImmediate1) return number(index, source - kImmediate0);
    bool const is_input = source == kInput || index == 0;
    return element(is_input ? "%z_" : value_registers(index - 1), i);
  }

  void write_instruction(int index, int i) {
    Instruction const& instruction = program_.instructions[index];
    if (index >= resident_end_) load_numbers(index);
    std::vector<std::string> arguments(3);
    for (int argument = 0; argument < kOps[instruction.op].arity; ++argument) {
      arguments[argument] = argument_at(index, argument_source(instruction, argument), i);
    }
    arguments.push_back(number(index, kFirstImmediate));
    arguments.push_back(number(index, kSecondImmediate));
    std::string const result = element(value_registers(index), i);
    paste(snippet_of(index), arguments, {result}, copies_++, body_.text);
    if (multiplies_and_adds(index)) {
      line("fma.rn.f32 " + result + ", " + result + ", " + number(index, kScale) + ", " + number(index, kShift) + ";");
    }
  }

  void write_element(int i) {
    for (int index = 0; index < program_.length; ++index) {
      write_instruction(index, i);
      uint8_t const slot = program_.instructions[index].slot;
      if (slot != kNoSlot) slots_[slot] = index;
    }
  }

  void move(std::string const& to, std::string const& from) { line("mov.f32 " + to + ", " + from + ";"); }

  // A pass takes the first registers of %z_ and leaves its results in the last, so that after all passes every result
  // stands where its element did.
  void rotate() {
    for (int i = 0; i + kPass < kFragment; ++i) move(element("%z_", i), element("%z_", i + kPass));
    for (int i = 0; i < kPass; ++i) {
      move(element("%z_", kFragment - kPass + i), element(value_registers(program_.length - 1), i));
    }
  }

  void write_passes() {
    line(".reg .b32 %passes;");
    line(".reg .pred %more;");
    // A constant that ptxas cannot see, as n is never negative: it unrolls a loop whose count it knows.
    line("shr.s32 %passes, %n, 31;");
    line("add.s32 %passes, %passes, " + std::to_string(kFragment / kPass) + ";");
    body_.text += "$Lpass:\n";
    line(".pragma \"nounroll\";");
    load_operands();
    for (int i = 0; i < kPass; ++i) write_element(i);
    rotate();
    line("add.s32 %n, %n, " + std::to_string(kColumnsPerPass) + ";");
    line("add.s32 %passes, %passes, -1;");
    line("setp.gt.s32 %more, %passes, 0;");
    body_.text += "@%more bra $Lpass;\n";
  }

  void return_fragment(std::string const& registers) {
    for (int i = 0; i < kFragment; ++i) {
      line("st.param.f32 [" + signature_.result + "+" + std::to_string(4 * i) + "], " + element(registers, i) + ";");
    }
    line("ret;");
  }

  Program const& program_;
  OperandTypes const& operands_;
  OpSnippets const& snippets_;
  EpilogueSignature const& signature_;
  EpilogueBody body_;
  int elements_ = 0;  // that the program is written for
  int copies_ = 0;
  int resident_end_ = 0;                   // of the instructions whose numbers stay in registers
  std::array<int, kMaxSlots> slots_ = {};  // the instruction whose result each slot holds
};

}  // namespace

EpilogueBody write_epilogue_body(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
                                 EpilogueSignature const& signature) {
  return BodyWriter(program, operands, snippets, signature).write();
}

}  // namespace cutfuse::specialize
