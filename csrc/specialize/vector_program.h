// A program in the marks of a kernel: for pieces of aligned rows, whose operands are loaded ahead.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "specialize/marked_kernel.h"
#include "specialize/operand_loads.h"

namespace cutfuse::specialize {

class VectorProgram {
 public:
  // parameter: the kernel's, whose layout is given.
  VectorProgram(MarkedLayout const& layout, std::string const& parameter, Program const& program,
                OperandTypes const& operands, OpSnippets const& snippets);
  virtual ~VectorProgram() = default;

  // What takes the place of a mark. The first is cutfuse.layout.
  std::string write(Mark const& mark);

  // The tables that all of it reads.
  std::vector<std::string> globals() { return writer_.take().globals; }

  // Blocks of a multiprocessor that have the registers it needs.
  int blocks(int threads) const;

 protected:
  // The program as `writer` writes it.
  VectorProgram(MarkedLayout const& layout, std::string parameter, Program const& program, OperandTypes const& operands,
                OpSnippets const& snippets, std::unique_ptr<ProgramWriter> writer);

  virtual void declare_program();
  virtual int element_instructions() const { return writer_.instructions(); }
  virtual int longest_snippet() const { return writer_.longest_op(); }
  // Registers of a thread beside those of operands.
  virtual int own_registers() const { return layout_.elements; }
  // The marks of the program itself; false for another one.
  virtual bool write_program(Mark const& mark);

  bool is_short() const;
  int elements() const { return layout_.elements; }
  int pieces() const { return layout_.pieces; }
  // A piece's input and operands, as the program reads them.
  void take_input(std::string const* values, int piece);
  // A loop over passes of kPass elements through whose first registers a piece is rotated: its program and operands.
  static constexpr int kPass = 2;
  std::string begin_passes();
  void end_passes(std::string const& label);

 private:
  void declare();
  void compute(Mark const& mark);
  void write_passes();

  MarkedLayout const layout_;
  std::string const parameter_;
  Program const& program_;
  std::unique_ptr<ProgramWriter> const owned_;
  int loops_ = 0;  // that have been written, each with a label of its own

 protected:
  ProgramWriter& writer_;

 private:
  OperandLoads loads_;
};

}  // namespace cutfuse::specialize
