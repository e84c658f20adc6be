// The PTX of the kernels that programs are compiled into, and with a program in it: in the place of its function
// run_epilogue, or at marks in its body.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "epilogue/program.h"
#include "specialize/epilogue_function.h"
#include "specialize/marked_kernel.h"
#include "specialize/op_snippets.h"

namespace cutfuse::specialize {

// The PTX of a kernel as KernelText takes it: of a GEMM kernel by the name of its row in plan/gemm_configs.def, of one
// in *_templates.cu by its own. Empty for another name. In builds with kernels only: written by
// cmake/embed_kernel_templates.py.
std::string_view kernel_template(std::string_view kernel);

// The text of one kernel as nvcc compiled it, taken apart once. Throws std::invalid_argument where it is not such a
// text; the message names what is missing.
class KernelText {
 public:
  // wrt: the derivatives that are wanted of a kernel of such. variant: of a GEMM.
  explicit KernelText(std::string_view given, Inputs wrt = {}, GemmVariant const& variant = {});

  // What the kernel with this program is called, in its text and by profilers: its own name and the program's ops.
  std::string name_with(Program const& program) const;

  // The kernel with the program, which has to be complete, compiled in. launches_early: of a kernel with marks, which
  // is of any device, for those on which it waits for the previous kernel (common/launch.h). inlines: a short program
  // stands in the place of each call of run_epilogue, which is a function with a long one.
  std::string specialize(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
                         bool launches_early, bool inlines = true) const;

 private:
  bool is_inlined(std::string_view body, Program const& program, OperandTypes const& operands) const;

  std::string kernel_;  // the kernel's symbol
  Inputs wrt_;
  std::optional<MarkedKernel> marked_;  // in place of what follows, where the kernel has marks
  EpilogueSignature epilogue_;
  std::string head_;    // up to the first declaration
  std::string before_;  // from there to the epilogue function's opening brace
  std::string after_;   // from its closing brace on
  std::string rest_;    // everything behind the head but the function
  int call_count_ = 0;  // of the function in it
};

}  // namespace cutfuse::specialize
