// The operands of a program in the marks of a kernel: pieces of aligned rows, loaded ahead of the program. A kernel
// that has all of a thread's elements at once marks where they are loaded (cutfuse.load, or cutfuse.load_rows of pieces
// that lie in several rows), one with a loop over a line of them where it begins (cutfuse.locate) and where each
// piece's are (cutfuse.fetch).
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "epilogue/program.h"
#include "specialize/kernel_variant.h"
#include "specialize/op_snippets.h"
#include "specialize/program_writer.h"
#include "specialize/ptx_text.h"

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

constexpr char const* kLocateMark = "cutfuse.locate";
constexpr char const* kLoadRowsMark = "cutfuse.load_rows";

inline constexpr int kWordBytes = 4;

inline constexpr size_t kPosition = 3;  // the first arguments of a mark: outer, row, column

inline constexpr int kRowDimension = 1;  // of Operand::strides
inline constexpr int kColumnDimension = 2;

inline std::string word_registers(int operand) { return "%word" + std::to_string(operand) + "_"; }

inline std::string single_registers(int operand) { return "%single" + std::to_string(operand) + "_"; }

inline std::string address_register(int operand, int piece) {
  return "%address" + std::to_string(operand) + "_" + std::to_string(piece);
}

inline std::string stride_register(int operand) { return "%stride" + std::to_string(operand); }

inline std::string step_register(int operand) { return "%step" + std::to_string(operand); }

inline std::string vector_predicate(int operand) { return "%vectors" + std::to_string(operand); }

inline std::string gather_predicate(int operand) { return "%gathers" + std::to_string(operand); }

inline std::string offset_register(int piece) { return "%offset" + std::to_string(piece); }

inline std::string joined(std::vector<std::string> const& registers, int from, int count) {
  std::string text = registers[from];
  for (int i = 1; i < count; ++i) text += ", " + registers[from + i];
  return text;
}

// The parts of an instruction.
template <class... Parts>
inline std::string text_of(Parts const&... parts) {
  std::string text;
  (text.append(parts), ...);
  return text;
}

class OperandLoads {
 public:
  OperandLoads(MarkedLayout const& layout, std::string parameter, OperandTypes const& operands,
               OpSnippets const& snippets, ProgramWriter& writer)
      : layout_(layout), parameter_(std::move(parameter)), operands_(operands), snippets_(snippets), writer_(writer) {}

  void declare() {
    for (char const* name : {"%outer", "%row", "%column", "%place", "%jump"}) {
      writer_.line(".reg .b64 " + std::string(name) + ";");
    }
    for (int piece = 0; piece < layout_.pieces; ++piece) writer_.line(".reg .b64 " + offset_register(piece) + ";");
    writer_.line(".reg .pred %aligned;");
    for (char const* name : {"%exists", "%loads", "%gathers"}) writer_.line(".reg .pred " + std::string(name) + ";");
    for (int const operand : writer_.operands_read()) {
      writer_.declare_floats(word_registers(operand), words_of(operand) * (moves(operand) ? layout_.pieces : 1));
      if (is_single(operand)) {
        writer_.line(text_of(".reg .b32 ", single_registers(operand), "<", std::to_string(layout_.pieces), ">;"));
      }
      writer_.line(".reg .pred " + vector_predicate(operand) + ";");
      writer_.line(".reg .pred " + gather_predicate(operand) + ";");
      writer_.line(".reg .b64 " + stride_register(operand) + ";");
      writer_.line(".reg .b64 " + step_register(operand) + ";");
      for (int piece = 0; piece < layout_.pieces; ++piece) {
        writer_.line(".reg .b64 " + address_register(operand, piece) + ";");
      }
    }
  }

  // What takes the place of a mark; false for one that is not of operands.
  bool write(Mark const& mark) {
    if (mark.opcode == "cutfuse.load") {
      load(mark, kColumnDimension);
    } else if (mark.opcode == kLoadRowsMark) {
      load(mark, kRowDimension);
    } else if (mark.opcode == kLocateMark) {
      locate_line(mark);
    } else if (mark.opcode == "cutfuse.fetch") {
      fetch(mark);
    } else {
      return false;
    }
    return true;
  }

  // A piece of each operand, as the program reads it.
  void unpack(int piece) {
    for (int const operand : writer_.operands_read()) unpack_operand(operand, piece);
  }

  // Registers of an operand before that: those of its pieces and, where they are loaded one by one, of its address.
  int registers_of(int operand) const {
    constexpr int kAddress = 4;  // of a further piece, and what else it has at work
    constexpr int kLine = 6;     // of pieces that share an address: with their stride and step
    if (!moves(operand)) return words_of(operand);
    int const addresses = layout_.walks_line ? kLine : kAddress * (layout_.pieces - 1);
    return words_of(operand) * layout_.pieces + addresses;
  }

 private:
  OperandKind kind_of(int operand) const { return operands_[operand].kind; }
  // A piece of it is one element.
  bool is_single(int operand) const {
    return kind_of(operand) == OperandKind::kScalar || kind_of(operand) == OperandKind::kColumn;
  }

  // It is loaded again for each piece of a line.
  bool moves(int operand) const {
    return kind_of(operand) != OperandKind::kScalar && kind_of(operand) != OperandKind::kRow;
  }

  int words_of(int operand) const { return is_single(operand) ? 1 : layout_.elements * size_of(operand) / kWordBytes; }

  int size_of(int operand) const { return static_cast<int>(cutfuse::size_of(operands_[operand].dtype)); }

  // An element's bytes as a power of 2: a shift and an addition of 64 bits are two instructions of a GPU, and a
  // multiplication by a number and an addition four.
  std::string size_shift(int operand) const { return size_of(operand) == kWordBytes ? "2" : "1"; }

  int vector_bytes(int operand) const {
    constexpr int kWidest = 16;
    return std::min(kWidest, words_of(operand) * kWordBytes);
  }

  std::string operand_field(int operand, size_t offset) const {
    size_t const at = layout_.operands + sizeof(Operand) * static_cast<size_t>(operand) + offset;
    return "[" + parameter_ + "+" + std::to_string(at) + "]";
  }

  void load_stride(std::string const& into, int operand, int dimension) {
    size_t const field = offsetof(Operand, strides) + sizeof(int64_t) * static_cast<size_t>(dimension);
    writer_.line("ld.param.s64 " + into + ", " + operand_field(operand, field) + ";");
  }

  void read_position(Mark const& mark) {
    writer_.line("mov.b64 %outer, " + mark.arguments[0] + ";");
    writer_.line("mov.b64 %row, " + mark.arguments[1] + ";");
    writer_.line("mov.b64 %column, " + mark.arguments[2] + ";");
  }

  void load(Mark const& mark, int piece_dimension) {
    if (mark.arguments.size() != kPosition + static_cast<size_t>(layout_.pieces)) {
      refuse("has a cutfuse.load without an offset of each piece");
    }
    read_position(mark);
    for (int piece = 0; piece < layout_.pieces; ++piece) {
      std::string const& given = mark.arguments[kPosition + static_cast<size_t>(piece)];
      bool const is_number = given[0] != '%';
      writer_.line((is_number ? "mov.s64 " : "cvt.s64.s32 ") + offset_register(piece) + ", " + given + ";");
    }
    for (int const operand : writer_.operands_read()) load_vectors(operand, piece_dimension);
    for (int const operand : writer_.operands_read()) load_others(operand, piece_dimension);
  }

  // Where an operand begins, and whether the elements that follow along the dimension are neighbours that begin on a
  // vector's boundary.
  void locate(int operand, int dimension) {
    std::string const first = address_register(operand, 0);
    std::string const stride = stride_register(operand);
    char const* const places[] = {"%outer", "%row", "%column"};
    writer_.line("mov.s64 %place, 0;");
    for (int of = 0; of < 3; ++of) {
      load_stride(stride, operand, of);
      writer_.line("mad.lo.s64 %place, " + std::string(places[of]) + ", " + stride + ", %place;");
    }
    if (dimension != kColumnDimension) load_stride(stride, operand, dimension);
    writer_.line("ld.param.u64 " + first + ", " + operand_field(operand, offsetof(Operand, data)) + ";");
    writer_.line("cvta.to.global.u64 " + first + ", " + first + ";");
    move_on(operand, first, first);
    writer_.line("setp.eq.s64 " + vector_predicate(operand) + ", " + stride + ", 1;");
    require_aligned(operand, first);
  }

  // Leaves the vectors to an operand only where this number of bytes is whole ones.
  void require_aligned(int operand, std::string const& bytes) {
    std::string const is_vector = vector_predicate(operand);
    writer_.line("and.b64 %place, " + bytes + ", " + std::to_string(vector_bytes(operand) - 1) + ";");
    writer_.line("setp.eq.s64 %aligned, %place, 0;");
    writer_.line("and.pred " + is_vector + ", " + is_vector + ", %aligned;");
  }

  // An address so many elements of an operand as %place says behind another.
  void move_on(int operand, std::string const& address, std::string const& from) {
    writer_.line(text_of("shl.b64 %place, %place, ", size_shift(operand), ";"));
    writer_.line(text_of("add.s64 ", address, ", ", from, ", %place;"));
  }

  // Where each further piece of a located operand begins. Those that lie in a row begin on a vector's boundary where
  // the first does.
  void locate_pieces(int operand, int dimension) {
    bool const in_rows = dimension == kRowDimension;
    std::string const jump = in_rows ? "%jump" : stride_register(operand);
    if (in_rows) load_stride(jump, operand, kRowDimension);
    for (int piece = 1; piece < layout_.pieces; ++piece) {
      std::string const address = address_register(operand, piece);
      writer_.line("mul.lo.s64 %place, " + offset_register(piece) + ", " + jump + ";");
      move_on(operand, address, address_register(operand, 0));
      if (in_rows) require_aligned(operand, address);
    }
  }

  // The same for pieces of one row whose elements are neighbours, without a multiplication of 64 bits.
  void locate_neighbours(int operand) {
    for (int piece = 1; piece < layout_.pieces; ++piece) {
      writer_.line("mov.b64 %place, " + offset_register(piece) + ";");
      move_on(operand, address_register(operand, piece), address_register(operand, 0));
    }
  }

  // Beside where each operand begins: how far the next piece is, which have to be gathered piece by piece, and those
  // that do not change at all, which are loaded here.
  void locate_line(Mark const& mark) {
    if (mark.arguments.size() != kPosition + 3) {
      refuse("has a cutfuse.locate without a position, two dimensions and a step");
    }
    read_position(mark);
    writer_.line("setp.ne.s32 %gathers, 0, 0;");
    for (int const operand : writer_.operands_read()) locate_on_line(operand, mark);
  }

  void locate_on_line(int operand, Mark const& mark) {
    locate(operand, std::stoi(mark.arguments[kPosition]));
    if (!moves(operand)) return load_once(operand);
    measure_step(operand, std::stoi(mark.arguments[kPosition + 1]), mark.arguments[kPosition + 2]);
    if (is_single(operand)) return;
    std::string const gathers = gather_predicate(operand);
    writer_.line(text_of("not.pred ", gathers, ", ", vector_predicate(operand), ";"));
    writer_.line("or.pred %gathers, %gathers, " + gathers + ";");
  }

  // The bytes from one piece to the next, which is a vector too where they are whole ones.
  void measure_step(int operand, int dimension, std::string const& count) {
    std::string const step = step_register(operand);
    load_stride(step, operand, dimension);
    writer_.line("cvt.s64.s32 %place, " + count + ";");
    writer_.line("mul.lo.s64 " + step + ", " + step + ", %place;");
    writer_.line("mul.lo.s64 " + step + ", " + step + ", " + std::to_string(size_of(operand)) + ";");
    require_aligned(operand, step);
  }

  // Has the words of the next piece loaded, if there is one: vectors without a branch, and others behind one that is
  // common to all operands.
  void fetch(Mark const& mark) {
    if (mark.arguments.size() != 2) {
      refuse("has a cutfuse.fetch without a piece and whether there is one");
    }
    std::vector<int> moving;
    for (int const operand : writer_.operands_read()) {
      if (moves(operand)) moving.push_back(operand);
    }
    if (moving.empty()) return;
    int const piece = std::stoi(mark.arguments[0]);
    writer_.line("setp.ne.s32 %exists, " + mark.arguments[1] + ", 0;");
    for (int const operand : moving) {
      if (is_single(operand)) {
        load_single(operand, piece, "@%exists ");
      } else {
        writer_.line("and.pred %loads, %exists, " + vector_predicate(operand) + ";");
        load_words(operand, piece, address_register(operand, 0), "@%loads ");
      }
    }
    gather_piece(piece);
    for (int const operand : moving) {
      std::string const address = address_register(operand, 0);
      writer_.line(text_of("add.s64 ", address, ", ", address, ", ", step_register(operand), ";"));
    }
  }

  // What of a piece that exists is no vector.
  void gather_piece(int piece) {
    std::string const number = std::to_string(fetches_++);
    writer_.line("and.pred %loads, %exists, %gathers;");
    writer_.line("@!%loads bra $Lfetched" + number + ";");
    for (int const operand : writer_.operands_read()) {
      if (!moves(operand) || is_single(operand)) continue;
      std::string const end = "$Lgathered" + number + "_" + std::to_string(operand);
      writer_.line("@!" + gather_predicate(operand) + " bra " + end + ";");
      writer_.add(snippets_.load_words(operands_[operand].dtype, layout_.elements),
                  {address_register(operand, 0), stride_register(operand)}, words(operand, piece));
      writer_.label(end);
    }
    writer_.label("$Lfetched" + number);
  }

  void load_single(int operand, int piece, std::string const& guard) {
    char const* const type = size_of(operand) == kWordBytes ? "b32 " : "u16 ";
    writer_.line(text_of(guard, "ld.global.", type, single(operand, piece), ", [", address_register(operand, 0), "];"));
  }

  // The piece that a line has of an operand.
  void load_once(int operand) {
    if (is_single(operand)) return load_single(operand, 0, "");
    std::string const gather = "$Lgather" + std::to_string(operand);
    std::string const end = "$Lloaded" + std::to_string(operand);
    writer_.line(text_of("@!", vector_predicate(operand), " bra ", gather, ";"));
    load_words(operand, 0, address_register(operand, 0), "");
    writer_.line("bra " + end + ";");
    writer_.label(gather);
    writer_.add(snippets_.load_words(operands_[operand].dtype, layout_.elements),
                {address_register(operand, 0), stride_register(operand)}, words(operand, 0));
    writer_.label(end);
  }

  // The neighbours at an address, as vectors.
  void load_words(int operand, int piece, std::string const& address, std::string const& guard) {
    int const width = vector_bytes(operand) / kWordBytes;
    std::vector<std::string> const targets = words(operand, piece);
    for (int first = 0; first < words_of(operand); first += width) {
      writer_.line(text_of(guard, "ld.global.v", std::to_string(width), ".f32 {", joined(targets, first, width), "}, [",
                           address, "+", std::to_string(first * kWordBytes), "];"));
    }
  }

  // Vectors are loaded before anything else, so that all of them are on their way together.
  void load_vectors(int operand, int piece_dimension) {
    locate(operand, kColumnDimension);
    if (piece_dimension == kColumnDimension) {
      locate_neighbours(operand);
    } else {
      locate_pieces(operand, piece_dimension);
    }
    std::string const end = "$Lvectors" + std::to_string(operand);
    writer_.line("@!" + vector_predicate(operand) + " bra " + end + ";");
    for (int piece = 0; piece < layout_.pieces; ++piece) {
      load_words(operand, piece, address_register(operand, piece), "");
    }
    writer_.label(end);
  }

  void load_others(int operand, int piece_dimension) {
    std::string const end = "$Lloaded" + std::to_string(operand);
    writer_.line("@" + vector_predicate(operand) + " bra " + end + ";");
    if (piece_dimension == kColumnDimension) locate_pieces(operand, piece_dimension);
    for (int piece = 0; piece < layout_.pieces; ++piece) {
      writer_.add(snippets_.load_words(operands_[operand].dtype, layout_.elements),
                  {address_register(operand, piece), stride_register(operand)}, words(operand, piece));
    }
    writer_.label(end);
  }

  // Of a single element: the one that unpack_single makes, as often as a piece has words.
  std::vector<std::string> words(int operand, int piece) const {
    int const count = layout_.elements * size_of(operand) / kWordBytes;
    if (is_single(operand)) return std::vector<std::string>(count, element(word_registers(operand), 0));
    return elements(word_registers(operand), moves(operand) ? piece * count : 0, count);
  }

  std::string single(int operand, int piece) const {
    return element(single_registers(operand), moves(operand) ? piece : 0);
  }

  // Makes words of one element that is all elements of a piece.
  void unpack_single(int operand, int piece) {
    std::string const word = words(operand, piece)[0];
    if (size_of(operand) == kWordBytes) {
      writer_.line(text_of("mov.b32 ", word, ", ", single(operand, piece), ";"));
    } else {
      writer_.line(text_of("{ .reg .b16 low, high; mov.b32 {low, high}, ", single(operand, piece), "; mov.b32 ", word,
                           ", {low, low}; }"));
    }
  }

  void unpack_operand(int operand, int piece) {
    if (is_single(operand)) unpack_single(operand, piece);
    std::vector<std::string> const packed = words(operand, piece);
    std::vector<std::string> const values = elements(operand_registers(operand), 0, layout_.elements);
    DType const dtype = operands_[operand].dtype;
    if (dtype == DType::kFloat32) {
      for (int i = 0; i < layout_.elements; ++i) writer_.move(values[i], packed[i]);
    } else {
      writer_.add(snippets_.unpack(dtype, layout_.elements), packed, values);
    }
  }

  MarkedLayout const layout_;
  std::string const parameter_;
  OperandTypes const& operands_;
  OpSnippets const& snippets_;
  ProgramWriter& writer_;
  int fetches_ = 0;  // marks that have been written, each with labels of its own
};

}  // namespace cutfuse::specialize
