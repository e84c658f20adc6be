// A kernel with marks where a program goes, such as those of *_templates.cu: its PTX with a program in it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "epilogue/program.h"
#include "specialize/kernel_name.h"
#include "specialize/op_snippets.h"
#include "specialize/operand_types.h"
#include "specialize/program_writer.h"

namespace cutfuse::specialize {

// What the mark cutfuse.layout says: see pointwise_templates.cu.
struct MarkedLayout {
  int program;   // offset of the Program in the kernel's parameters
  int operands;  // and of the Operands
  int elements;  // of a piece: neighbours of a thread, a vector of the kernel's type
  int pieces;    // of a thread
  Primitives primitives;
  int registers;    // that the kernel needs for itself and an op
  bool walks_line;  // loads an operand's pieces one after another in a loop (cutfuse.locate), all from one address

  ProgramAddress program_address(std::string const& parameter) const {
    return {".param", parameter, static_cast<size_t>(program)};
  }
};

// A mark: its opcode, such as "cutfuse.load", and what stands behind it, one register or number each.
struct Mark {
  std::string opcode;
  std::vector<std::string> arguments;
};

// The text of one kernel as nvcc compiled it, taken apart once. Throws std::invalid_argument where it is not such a
// text; the message names what is missing.
class MarkedKernel {
 public:
  explicit MarkedKernel(std::string_view ptx);

  static bool is_marked(std::string_view ptx);

  // The kernel with the program, which has to be prepared. `kernel`: the kernel's symbol. wrt: what a kernel of
  // derivatives gives.
  ProgramText specialize(std::string const& kernel, Inputs const& wrt, Program const& program,
                         OperandTypes const& operands, OpSnippets const& snippets) const;

 private:
  void read_layout();
  bool has_mark(std::string_view opcode) const;

  std::vector<std::string> texts_;  // before, between and behind the marks
  std::vector<Mark> marks_;
  MarkedLayout layout_;
};

}  // namespace cutfuse::specialize
