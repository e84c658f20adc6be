// A program as straight-line PTX, for a number of elements of one thread: what every function and kernel that programs
// are compiled into has in common.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "epilogue/program.h"
#include "specialize/kernel_variant.h"
#include "specialize/op_snippets.h"

namespace cutfuse::specialize {

// How the program is read at run time, whose numbers are: "ld.f32 %to, [%params+24];".
struct ProgramAddress {
  std::string space;  // of the load: "" or ".param"
  std::string base;   // a register or a parameter
  size_t offset;      // of the Program behind it
};

// PTX, and what it needs in its module.
struct ProgramText {
  std::string text;
  std::vector<std::string> globals;  // the tables that it reads, each once
};

// Where an instruction takes argument 0, 1 or 2 from.
int argument_source(Instruction const& instruction, int argument);

// An element of a family of registers: "%z_3".
std::string element(std::string const& registers, int i);
// `count` of them.
std::vector<std::string> elements(std::string const& registers, int first, int count);

// Adds an item to a list that lacks it.
std::string add_new(std::vector<std::string>& list, std::string const& item);

// Families that the owner of a writer fills: the input's elements, and those of each operand that the program reads.
constexpr char const* kInputRegisters = "%z_";
std::string operand_registers(int operand);

// It gives the interpreter's bits: the same functors in the same order.
class ProgramWriter {
 public:
  ProgramWriter(Program const& program, OpSnippets const& snippets, Primitives primitives, ProgramAddress address);
  virtual ~ProgramWriter() = default;

  // Instructions of PTX that one element takes.
  int instructions() const;
  // And the longest of its ops.
  int longest_op() const;
  int number_count() const;
  // The operands that an instruction reads, ascending.
  std::vector<int> const& operands_read() const { return operands_read_; }

  // How an operand's elements lie in its registers; kStrided unless it is said.
  void set_kind(int operand, OperandKind kind) { kinds_[operand] = kind; }

  // Registers: of so many elements of the input and of operands, and of so many that the program is written for.
  void declare(int inputs, int operands, int elements);
  void declare_floats(std::string const& registers, int count);

  // Loads as many instructions' numbers as fit into `room` registers; those of others are loaded where they are read.
  void load_numbers(int room);

  // The program for element i.
  void write_element(int i);
  // The registers with its values.
  std::string results() const;

  void line(std::string const& text) { written_.text += "\t" + text + "\n"; }
  void label(std::string const& name) { written_.text += name + ":\n"; }
  void move(std::string const& to, std::string const& from) { line("mov.f32 " + to + ", " + from + ";"); }
  void add(Snippet const& snippet, std::vector<std::string> const& arguments, std::vector<std::string> const& results);
  // Shifts the first `count` elements to the left by `by`.
  void rotate(std::string const& registers, int count, int by);

  // What has been written since the last time.
  std::string take_text() { return std::exchange(written_.text, std::string()); }
  ProgramText take() { return std::move(written_); }

  // Tables and arrays of snippets.
  void declare_needs(std::vector<Snippet const*> const& snippets);

 protected:
  // Told of an instruction whose op has given its value, which has not been scaled and shifted yet.
  virtual void after_op(int /*index*/, int /*i*/, std::vector<std::string> const& /*arguments*/) {}

  bool multiplies_and_adds(int index) const;
  std::string scale_of(int index) const;
  std::string value_of(int index, int i) const;
  Program const& program() const { return program_; }
  OpSnippets const& snippets() const { return snippets_; }
  Primitives primitives() const { return primitives_; }
  // The instruction whose result a slot holds.
  int slot_holder(int slot) const { return slots_[slot]; }

 private:
  Snippet const& snippet_of(int index) const;
  bool reads_number(int index, int number) const;
  void load_number(int index, int which);
  void load_numbers_of(int index);
  std::string argument_at(int index, int source, int i) const;
  void write_instruction(int index, int i);

  Program const& program_;
  OpSnippets const& snippets_;
  Primitives const primitives_;
  ProgramAddress const address_;
  std::vector<int> const operands_read_;
  ProgramText written_;
  int copies_ = 0;
  std::array<OperandKind, kMaxOperands> kinds_ = {};
  int resident_end_ = 0;                   // of the instructions whose numbers stay in registers
  std::array<int, kMaxSlots> slots_ = {};  // the instruction whose result each slot holds
};

}  // namespace cutfuse::specialize
