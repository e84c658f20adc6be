// A kernel's PTX with another epilogue in it.
#pragma once

#include <string>
#include <string_view>

#include "epilogue/program.h"
#include "specialize/epilogue_function.h"
#include "specialize/op_snippets.h"

namespace cutfuse::specialize {

// The text of one kernel as nvcc compiled it, taken apart once. Throws std::invalid_argument where it is not such a
// text; the message names what is missing.
class KernelText {
 public:
  explicit KernelText(std::string_view ptx);

  EpilogueSignature const& epilogue() const { return epilogue_; }

  // What the kernel with this program is called, in its text and by profilers: its own name and the program's ops.
  std::string name_with(Program const& program) const;

  // The kernel with the program, which has to be prepared, as its epilogue.
  std::string specialize(Program const& program, OperandTypes const& operands, OpSnippets const& snippets) const;

 private:
  std::string kernel_;  // the kernel's symbol
  EpilogueSignature epilogue_;
  std::string head_;    // up to the first declaration
  std::string before_;  // from there to the epilogue function's opening brace
  std::string after_;   // from its closing brace on
};

}  // namespace cutfuse::specialize
