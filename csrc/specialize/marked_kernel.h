// A kernel with marks where a program goes, such as those of *_templates.cu: its PTX with a program in it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "epilogue/program.h"
#include "specialize/kernel_variant.h"
#include "specialize/op_snippets.h"
#include "specialize/operand_loads.h"
#include "specialize/program_writer.h"

namespace cutfuse::specialize {

// The text of one kernel as nvcc compiled it, taken apart once. Throws std::invalid_argument where it is not such a
// text; the message names what is missing.
class MarkedKernel {
 public:
  explicit MarkedKernel(std::string_view ptx);

  static bool is_marked(std::string_view ptx);

  // The kernel with the program, which has to be complete. `kernel`: the kernel's symbol. wrt: what a kernel of
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
