// The operands of a program in the marks of a kernel: pieces of aligned rows, loaded ahead of the program. A kernel
// that has all of a thread's elements at once marks where they are loaded (cutfuse.load, or cutfuse.load_rows of pieces
// that lie in several rows), one with a loop over a line of them where it begins (cutfuse.locate) and where each
// piece's are (cutfuse.fetch).
#pragma once

#include <string>
#include <vector>

#include "specialize/marked_kernel.h"

namespace cutfuse::specialize {

constexpr char const* kLocateMark = "cutfuse.locate";

class OperandLoads {
 public:
  OperandLoads(MarkedLayout const& layout, std::string parameter, Program const& program, OperandTypes const& operands,
               OpSnippets const& snippets, ProgramWriter& writer);

  void declare();
  // What takes the place of a mark; false for one that is not of operands.
  bool write(Mark const& mark);
  // A piece of each operand, as the program reads it.
  void unpack(int piece);
  // Registers of an operand before that: those of its pieces and, where they are loaded one by one, of its address.
  int registers_of(int operand) const;

 private:
  OperandKind kind_of(int operand) const { return operands_[operand].kind; }
  // A piece of it is one element.
  bool is_single(int operand) const;
  // It is loaded again for each piece of a line.
  bool moves(int operand) const;
  int words_of(int operand) const;
  int size_of(int operand) const;
  std::string size_shift(int operand) const;
  int vector_bytes(int operand) const;
  std::string operand_field(int operand, size_t offset) const;
  void load_stride(std::string const& into, int operand, int dimension);
  void read_position(Mark const& mark);
  void load(Mark const& mark, int piece_dimension);
  void locate(int operand, int dimension);
  void require_aligned(int operand, std::string const& bytes);
  void move_on(int operand, std::string const& address, std::string const& from);
  void locate_pieces(int operand, int dimension);
  void locate_neighbours(int operand);
  void locate_line(Mark const& mark);
  void locate_on_line(int operand, Mark const& mark);
  void measure_step(int operand, int dimension, std::string const& count);
  void fetch(Mark const& mark);
  void gather_piece(int piece);
  void load_single(int operand, int piece, std::string const& guard);
  void load_once(int operand);
  void load_words(int operand, int piece, std::string const& address, std::string const& guard);
  void load_vectors(int operand, int piece_dimension);
  void load_others(int operand, int piece_dimension);
  std::vector<std::string> words(int operand, int piece) const;
  std::string single(int operand, int piece) const;
  void unpack_single(int operand, int piece);
  void unpack_operand(int operand, int piece);

  MarkedLayout const layout_;
  std::string const parameter_;
  Program const& program_;
  OperandTypes const& operands_;
  OpSnippets const& snippets_;
  ProgramWriter& writer_;
  int fetches_ = 0;  // marks that have been written, each with labels of its own
};

}  // namespace cutfuse::specialize
