#include "specialize/operand_loads.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace cutfuse::specialize {
namespace {

constexpr int kWordBytes = 4;

constexpr size_t kPosition = 3;  // the first arguments of a mark: outer, row, column

constexpr int kRowDimension = 1;  // of Operand::strides
constexpr int kColumnDimension = 2;

std::string word_registers(int operand) { return "%word" + std::to_string(operand) + "_"; }

std::string single_registers(int operand) { return "%single" + std::to_string(operand) + "_"; }

std::string address_register(int operand, int piece) {
  return "%address" + std::to_string(operand) + "_" + std::to_string(piece);
}

std::string stride_register(int operand) { return "%stride" + std::to_string(operand); }

std::string step_register(int operand) { return "%step" + std::to_string(operand); }

std::string vector_predicate(int operand) { return "%vectors" + std::to_string(operand); }

std::string gather_predicate(int operand) { return "%gathers" + std::to_string(operand); }

std::string offset_register(int piece) { return "%offset" + std::to_string(piece); }

std::string joined(std::vector<std::string> const& registers, int from, int count) {
  std::string text = registers[from];
  for (int i = 1; i < count; ++i) text += ", " + registers[from + i];
  return text;
}

// The parts of an instruction.
template <class... Parts>
std::string text_of(Parts const&... parts) {
  std::string text;
  (text.append(parts), ...);
  return text;
}

}  // namespace

OperandLoads::OperandLoads(MarkedLayout const& layout, std::string parameter, Program const& program,
                           OperandTypes const& operands, OpSnippets const& snippets, ProgramWriter& writer)
    : layout_(layout),
      parameter_(std::move(parameter)),
      program_(program),
      operands_(operands),
      snippets_(snippets),
      writer_(writer) {}

bool OperandLoads::write(Mark const& mark) {
  if (mark.opcode == "cutfuse.load") {
    load(mark, kColumnDimension);
  } else if (mark.opcode == "cutfuse.load_rows") {
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

int OperandLoads::size_of(int operand) const { return static_cast<int>(cutfuse::size_of(operands_[operand].dtype)); }

bool OperandLoads::is_single(int operand) const {
  return kind_of(operand) == OperandKind::kScalar || kind_of(operand) == OperandKind::kColumn;
}

bool OperandLoads::moves(int operand) const {
  return kind_of(operand) != OperandKind::kScalar && kind_of(operand) != OperandKind::kRow;
}

int OperandLoads::words_of(int operand) const {
  return is_single(operand) ? 1 : layout_.elements * size_of(operand) / kWordBytes;
}

int OperandLoads::registers_of(int operand) const {
  constexpr int kAddress = 4;  // of a further piece, and what else it has at work
  constexpr int kLine = 6;     // of pieces that share an address: with their stride and step
  if (!moves(operand)) return words_of(operand);
  int const addresses = layout_.walks_line ? kLine : kAddress * (layout_.pieces - 1);
  return words_of(operand) * layout_.pieces + addresses;
}

// An element's bytes as a power of 2: a shift and an addition of 64 bits are two instructions of a GPU, and a
// multiplication by a number and an addition four.
std::string OperandLoads::size_shift(int operand) const { return size_of(operand) == kWordBytes ? "2" : "1"; }

int OperandLoads::vector_bytes(int operand) const {
  constexpr int kWidest = 16;
  return std::min(kWidest, words_of(operand) * kWordBytes);
}

std::string OperandLoads::operand_field(int operand, size_t offset) const {
  size_t const at = layout_.operands + sizeof(Operand) * static_cast<size_t>(operand) + offset;
  return "[" + parameter_ + "+" + std::to_string(at) + "]";
}

void OperandLoads::load_stride(std::string const& into, int operand, int dimension) {
  size_t const field = offsetof(Operand, strides) + sizeof(int64_t) * static_cast<size_t>(dimension);
  writer_.line("ld.param.s64 " + into + ", " + operand_field(operand, field) + ";");
}

void OperandLoads::declare() {
  for (char const* name : {"%outer", "%row", "%column", "%place", "%jump"}) {
    writer_.line(".reg .b64 " + std::string(name) + ";");
  }
  for (int piece = 0; piece < layout_.pieces; ++piece) writer_.line(".reg .b64 " + offset_register(piece) + ";");
  writer_.line(".reg .pred %aligned;");
  for (char const* name : {"%exists", "%loads", "%gathers"}) writer_.line(".reg .pred " + std::string(name) + ";");
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand)) continue;
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

void OperandLoads::read_position(Mark const& mark) {
  writer_.line("mov.b64 %outer, " + mark.arguments[0] + ";");
  writer_.line("mov.b64 %row, " + mark.arguments[1] + ";");
  writer_.line("mov.b64 %column, " + mark.arguments[2] + ";");
}

void OperandLoads::load(Mark const& mark, int piece_dimension) {
  if (mark.arguments.size() != kPosition + static_cast<size_t>(layout_.pieces)) {
    throw std::invalid_argument("the kernel's PTX has a cutfuse.load without an offset of each piece");
  }
  read_position(mark);
  for (int piece = 0; piece < layout_.pieces; ++piece) {
    std::string const& given = mark.arguments[kPosition + static_cast<size_t>(piece)];
    bool const is_number = given[0] != '%';
    writer_.line((is_number ? "mov.s64 " : "cvt.s64.s32 ") + offset_register(piece) + ", " + given + ";");
  }
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand)) load_vectors(operand, piece_dimension);
  }
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand)) load_others(operand, piece_dimension);
  }
}

// Where an operand begins, and whether the elements that follow along the dimension are neighbours that begin on a
// vector's boundary.
void OperandLoads::locate(int operand, int dimension) {
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
void OperandLoads::require_aligned(int operand, std::string const& bytes) {
  std::string const is_vector = vector_predicate(operand);
  writer_.line("and.b64 %place, " + bytes + ", " + std::to_string(vector_bytes(operand) - 1) + ";");
  writer_.line("setp.eq.s64 %aligned, %place, 0;");
  writer_.line("and.pred " + is_vector + ", " + is_vector + ", %aligned;");
}

// An address so many elements of an operand as %place says behind another.
void OperandLoads::move_on(int operand, std::string const& address, std::string const& from) {
  writer_.line(text_of("shl.b64 %place, %place, ", size_shift(operand), ";"));
  writer_.line(text_of("add.s64 ", address, ", ", from, ", %place;"));
}

// Where each further piece of a located operand begins. Those that lie in a row begin on a vector's boundary where the
// first does.
void OperandLoads::locate_pieces(int operand, int dimension) {
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
void OperandLoads::locate_neighbours(int operand) {
  for (int piece = 1; piece < layout_.pieces; ++piece) {
    writer_.line("mov.b64 %place, " + offset_register(piece) + ";");
    move_on(operand, address_register(operand, piece), address_register(operand, 0));
  }
}

// Beside where each operand begins: how far the next piece is, which have to be gathered piece by piece, and those that
// do not change at all, which are loaded here.
void OperandLoads::locate_line(Mark const& mark) {
  if (mark.arguments.size() != kPosition + 3) {
    throw std::invalid_argument("the kernel's PTX has a cutfuse.locate without a position, two dimensions and a step");
  }
  read_position(mark);
  writer_.line("setp.ne.s32 %gathers, 0, 0;");
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand)) locate_on_line(operand, mark);
  }
}

void OperandLoads::locate_on_line(int operand, Mark const& mark) {
  locate(operand, std::stoi(mark.arguments[kPosition]));
  if (!moves(operand)) return load_once(operand);
  measure_step(operand, std::stoi(mark.arguments[kPosition + 1]), mark.arguments[kPosition + 2]);
  if (is_single(operand)) return;
  std::string const gathers = gather_predicate(operand);
  writer_.line(text_of("not.pred ", gathers, ", ", vector_predicate(operand), ";"));
  writer_.line("or.pred %gathers, %gathers, " + gathers + ";");
}

// The piece that a line has of an operand.
void OperandLoads::load_once(int operand) {
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

// The bytes from one piece to the next, which is a vector too where they are whole ones.
void OperandLoads::measure_step(int operand, int dimension, std::string const& count) {
  std::string const step = step_register(operand);
  load_stride(step, operand, dimension);
  writer_.line("cvt.s64.s32 %place, " + count + ";");
  writer_.line("mul.lo.s64 " + step + ", " + step + ", %place;");
  writer_.line("mul.lo.s64 " + step + ", " + step + ", " + std::to_string(size_of(operand)) + ";");
  require_aligned(operand, step);
}

// Has the words of the next piece loaded, if there is one: vectors without a branch, and others behind one that is
// common to all operands.
void OperandLoads::fetch(Mark const& mark) {
  if (mark.arguments.size() != 2) {
    throw std::invalid_argument("the kernel's PTX has a cutfuse.fetch without a piece and whether there is one");
  }
  std::vector<int> moving;
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand) && moves(operand)) moving.push_back(operand);
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
void OperandLoads::gather_piece(int piece) {
  std::string const number = std::to_string(fetches_++);
  writer_.line("and.pred %loads, %exists, %gathers;");
  writer_.line("@!%loads bra $Lfetched" + number + ";");
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand) || !moves(operand) || is_single(operand)) continue;
    std::string const end = "$Lgathered" + number + "_" + std::to_string(operand);
    writer_.line("@!" + gather_predicate(operand) + " bra " + end + ";");
    writer_.add(snippets_.load_words(operands_[operand].dtype, layout_.elements),
                {address_register(operand, 0), stride_register(operand)}, words(operand, piece));
    writer_.label(end);
  }
  writer_.label("$Lfetched" + number);
}

void OperandLoads::load_single(int operand, int piece, std::string const& guard) {
  char const* const type = size_of(operand) == kWordBytes ? "b32 " : "u16 ";
  writer_.line(text_of(guard, "ld.global.", type, single(operand, piece), ", [", address_register(operand, 0), "];"));
}

// The neighbours at an address, as vectors.
void OperandLoads::load_words(int operand, int piece, std::string const& address, std::string const& guard) {
  int const width = vector_bytes(operand) / kWordBytes;
  std::vector<std::string> const targets = words(operand, piece);
  for (int first = 0; first < words_of(operand); first += width) {
    writer_.line(text_of(guard, "ld.global.v", std::to_string(width), ".f32 {", joined(targets, first, width), "}, [",
                         address, "+", std::to_string(first * kWordBytes), "];"));
  }
}

// Vectors are loaded before anything else, so that all of them are on their way together.
void OperandLoads::load_vectors(int operand, int piece_dimension) {
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

void OperandLoads::load_others(int operand, int piece_dimension) {
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
std::vector<std::string> OperandLoads::words(int operand, int piece) const {
  int const count = layout_.elements * size_of(operand) / kWordBytes;
  int const first = moves(operand) && !is_single(operand) ? piece * count : 0;
  std::vector<std::string> registers;
  registers.reserve(count);
  for (int i = 0; i < count; ++i) {
    registers.push_back(element(word_registers(operand), is_single(operand) ? 0 : first + i));
  }
  return registers;
}

std::string OperandLoads::single(int operand, int piece) const {
  return element(single_registers(operand), moves(operand) ? piece : 0);
}

// Makes words of one element that is all elements of a piece.
void OperandLoads::unpack_single(int operand, int piece) {
  std::string const word = words(operand, piece)[0];
  if (size_of(operand) == kWordBytes) {
    writer_.line(text_of("mov.b32 ", word, ", ", single(operand, piece), ";"));
  } else {
    writer_.line(text_of("{ .reg .b16 low, high; mov.b32 {low, high}, ", single(operand, piece), "; mov.b32 ", word,
                         ", {low, low}; }"));
  }
}

void OperandLoads::unpack_operand(int operand, int piece) {
  if (is_single(operand)) unpack_single(operand, piece);
  std::vector<std::string> const packed = words(operand, piece);
  std::vector<std::string> values;
  values.reserve(layout_.elements);
  for (int i = 0; i < layout_.elements; ++i) values.push_back(element(operand_registers(operand), i));
  DType const dtype = operands_[operand].dtype;
  if (dtype == DType::kFloat32) {
    for (int i = 0; i < layout_.elements; ++i) writer_.move(values[i], packed[i]);
  } else {
    writer_.add(snippets_.unpack(dtype, layout_.elements), packed, values);
  }
}

void OperandLoads::unpack(int piece) {
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand)) unpack_operand(operand, piece);
  }
}

}  // namespace cutfuse::specialize
