// A program in the marks of a kernel: for pieces of aligned rows, with their operands loaded ahead. A kernel that has
// all of a thread's elements at once marks where they are loaded (cutfuse.load), one with a loop over a line of them
// where it begins (cutfuse.locate) and where each piece's are (cutfuse.fetch).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "specialize/marked_kernel.h"

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
  static constexpr int kRowDimension = 1;  // of Operand::strides
  static constexpr int kColumnDimension = 2;

  int words_of(int operand) const;
  int size_of(int operand) const;
  int vector_bytes(int operand) const;
  std::string operand_field(int operand, size_t offset) const;
  void declare();
  void read_position(Mark const& mark);
  void load(Mark const& mark);
  void load_stride(std::string const& into, int operand, int dimension);
  void require_aligned(int operand, std::string const& bytes);
  void locate(int operand, int dimension);
  void locate_pieces(int operand);
  void locate_line(Mark const& mark);
  void fetch(Mark const& mark);
  void measure_step(int operand, int dimension, std::string const& count);
  void load_words(int operand, int piece, std::string const& address, std::string const& guard);
  void load_vectors(int operand);
  void load_others(int operand);
  std::vector<std::string> words(int operand, int piece) const;
  void unpack(int operand, int piece);
  void compute(Mark const& mark);
  void write_passes();

  MarkedLayout const layout_;
  std::string const parameter_;
  Program const& program_;
  OperandTypes const& operands_;
  OpSnippets const& snippets_;
  std::unique_ptr<ProgramWriter> const owned_;
  int piece_dimension_ = kColumnDimension;  // in which a thread's pieces lie
  int fetches_ = 0;                         // marks that have been written, each with labels of its own
  int loops_ = 0;

 protected:
  ProgramWriter& writer_;
};

}  // namespace cutfuse::specialize
