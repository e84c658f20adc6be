// A program in the marks of a kernel: for pieces of aligned rows, with their operands loaded ahead. A kernel that has
// all of a thread's elements at once marks where they are loaded (cutfuse.load), one with a loop over a line of them
// where it begins (cutfuse.locate) and where each piece's are (cutfuse.fetch).
#pragma once

#include "specialize/marked_kernel.h"

namespace cutfuse::specialize {

class VectorProgram {
 public:
  // parameter: the kernel's, whose layout is given.
  VectorProgram(MarkedLayout const& layout, std::string parameter, Program const& program, OperandTypes const& operands,
                OpSnippets const& snippets);

  // What takes the place of a mark. The first is cutfuse.layout.
  std::string write(Mark const& mark);

  // The tables that all of it reads.
  std::vector<std::string> globals() { return writer_.take().globals; }

  // Blocks of a multiprocessor that have the registers it needs.
  int blocks(int threads) const;

 private:
  bool is_short() const;
  int words_of(int operand) const;
  int size_of(int operand) const;
  int vector_bytes(int operand) const;
  std::string operand_field(int operand, size_t offset) const;
  void declare();
  void read_position(Mark const& mark);
  void load(Mark const& mark);
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
  ProgramWriter writer_;
  int fetches_ = 0;  // marks that have been written, each with labels of its own
  int loops_ = 0;
};

}  // namespace cutfuse::specialize
