// A program's derivatives in the marks of a kernel: see backward_templates.cu.
#pragma once

#include "specialize/derivative_writer.h"
#include "specialize/vector_program.h"

namespace cutfuse::specialize {

// Multiplies a piece's gradients by a derivative; a kernel has these marks for all derivatives there may be.
constexpr char const* kDerivativeMark = "cutfuse.derivative";

// Loads operands for pieces in several rows, in the loop of a kernel that adds columns up.
constexpr char const* kLoadRowsMark = "cutfuse.load_rows";

class BackwardProgram final : public VectorProgram {
 public:
  BackwardProgram(MarkedLayout const& layout, std::string const& parameter, Program const& program,
                  OperandTypes const& operands, OpSnippets const& snippets, Inputs const& wrt, bool sums_columns);

 private:
  void declare_program() override;
  int element_instructions() const override { return derivatives_.element_instructions(); }
  int longest_snippet() const override { return derivatives_.longest_snippet(); }
  int own_registers() const override;
  bool write_program(Mark const& mark) override;

  void differentiate(Mark const& mark);
  void write_passes();
  void multiply(Mark const& mark);

  bool const sums_columns_;
  DerivativeWriter& derivatives_;  // the base's writer
};

}  // namespace cutfuse::specialize
