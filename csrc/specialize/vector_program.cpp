#include "specialize/vector_program.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "epilogue/ops.h"

namespace cutfuse::specialize {
namespace {

// Instructions of PTX up to which the program is written once for each element of a thread. Longer ones are written for
// a pass of elements, in a loop through whose first registers each piece is rotated: see epilogue_function.cpp.
constexpr int kMostStraightLine = 2400;

constexpr int kWordBytes = 4;

constexpr size_t kPosition = 3;  // the first arguments of a mark: outer, row, column

std::string word_registers(int operand) { return "%word" + std::to_string(operand) + "_"; }

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

}  // namespace

VectorProgram::VectorProgram(MarkedLayout const& layout, std::string parameter, Program const& program,
                             OperandTypes const& operands, OpSnippets const& snippets,
                             std::unique_ptr<ProgramWriter> writer)
    : layout_(layout),
      parameter_(std::move(parameter)),
      program_(program),
      operands_(operands),
      snippets_(snippets),
      owned_(std::move(writer)),
      writer_(*owned_) {}

VectorProgram::VectorProgram(MarkedLayout const& layout, std::string const& parameter, Program const& program,
                             OperandTypes const& operands, OpSnippets const& snippets)
    : VectorProgram(
          layout, parameter, program, operands, snippets,
          std::make_unique<ProgramWriter>(program, snippets, layout.primitives, layout.program_address(parameter))) {}

std::string VectorProgram::write(Mark const& mark) {
  if (mark.opcode == "cutfuse.layout") {
    declare();
  } else if (mark.opcode == "cutfuse.load") {
    load(mark);
  } else if (mark.opcode == "cutfuse.load_rows") {
    piece_dimension_ = kRowDimension;
    load(mark);
  } else if (mark.opcode == "cutfuse.locate") {
    locate_line(mark);
  } else if (mark.opcode == "cutfuse.fetch") {
    fetch(mark);
  } else if (!write_program(mark)) {
    throw std::invalid_argument("the kernel's PTX has an unknown mark " + mark.opcode);
  }
  return writer_.take_text();
}

bool VectorProgram::write_program(Mark const& mark) {
  if (mark.opcode != "cutfuse.compute") return false;
  compute(mark);
  return true;
}

bool VectorProgram::is_short() const {
  return element_instructions() * layout_.elements * layout_.pieces <= kMostStraightLine;
}

int VectorProgram::blocks(int threads) const {
  constexpr int kRegisters = 65536;  // of a multiprocessor
  constexpr int kAddress = 4;        // of an operand's piece, and what else it has at work
  constexpr int kOfLongOps = 16;     // erfc of two elements at once: spills without them
  constexpr int kLongOp = 64;        // instructions
  int held = layout_.registers + own_registers() + (longest_snippet() > kLongOp ? kOfLongOps : 0);
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand)) continue;
    held += words_of(operand) * layout_.pieces + kAddress * (layout_.pieces - 1);
    if (!is_short()) held += layout_.elements;
  }
  return std::max(1, kRegisters / (threads * held));
}

int VectorProgram::size_of(int operand) const { return static_cast<int>(cutfuse::size_of(operands_[operand].dtype)); }

int VectorProgram::words_of(int operand) const { return layout_.elements * size_of(operand) / kWordBytes; }

int VectorProgram::vector_bytes(int operand) const {
  constexpr int kWidest = 16;
  return std::min(kWidest, words_of(operand) * kWordBytes);
}

std::string VectorProgram::operand_field(int operand, size_t offset) const {
  size_t const at = layout_.operands + sizeof(Operand) * static_cast<size_t>(operand) + offset;
  return "[" + parameter_ + "+" + std::to_string(at) + "]";
}

void VectorProgram::load_stride(std::string const& into, int operand, int dimension) {
  size_t const field = offsetof(Operand, strides) + sizeof(int64_t) * static_cast<size_t>(dimension);
  writer_.line("ld.param.s64 " + into + ", " + operand_field(operand, field) + ";");
}

void VectorProgram::declare_program() {
  writer_.declare(layout_.elements, layout_.elements, is_short() ? layout_.elements : kPass);
}

void VectorProgram::declare() {
  declare_program();
  for (char const* name : {"%outer", "%row", "%column", "%place", "%jump"}) {
    writer_.line(".reg .b64 " + std::string(name) + ";");
  }
  for (int piece = 0; piece < layout_.pieces; ++piece) writer_.line(".reg .b64 " + offset_register(piece) + ";");
  writer_.line(".reg .pred %aligned;");
  writer_.line(".reg .b32 %passes;");
  writer_.line(".reg .pred %more;");
  for (char const* name : {"%exists", "%loads", "%gathers"}) writer_.line(".reg .pred " + std::string(name) + ";");
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand)) continue;
    writer_.declare_floats(word_registers(operand), words_of(operand) * layout_.pieces);
    writer_.line(".reg .pred " + vector_predicate(operand) + ";");
    writer_.line(".reg .pred " + gather_predicate(operand) + ";");
    writer_.line(".reg .b64 " + stride_register(operand) + ";");
    writer_.line(".reg .b64 " + step_register(operand) + ";");
    for (int piece = 0; piece < layout_.pieces; ++piece) {
      writer_.line(".reg .b64 " + address_register(operand, piece) + ";");
    }
  }
  // All numbers: they are in the constant bank, from which an instruction takes its argument without a register.
  writer_.load_numbers(writer_.number_count());
}

void VectorProgram::read_position(Mark const& mark) {
  writer_.line("mov.b64 %outer, " + mark.arguments[0] + ";");
  writer_.line("mov.b64 %row, " + mark.arguments[1] + ";");
  writer_.line("mov.b64 %column, " + mark.arguments[2] + ";");
}

void VectorProgram::load(Mark const& mark) {
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
    if (writer_.reads_operand(operand)) load_vectors(operand);
  }
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand)) load_others(operand);
  }
}

// Where an operand begins, and whether the elements that follow along the dimension are neighbours that begin on a
// vector's boundary.
void VectorProgram::locate(int operand, int dimension) {
  std::string const first = address_register(operand, 0);
  std::string const stride = stride_register(operand);
  std::string const size = std::to_string(size_of(operand));
  char const* const places[] = {"%outer", "%row", "%column"};
  writer_.line("mov.s64 %place, 0;");
  for (int of = 0; of < 3; ++of) {
    load_stride(stride, operand, of);
    writer_.line("mad.lo.s64 %place, " + std::string(places[of]) + ", " + stride + ", %place;");
  }
  if (dimension != kColumnDimension) load_stride(stride, operand, dimension);
  writer_.line("ld.param.u64 " + first + ", " + operand_field(operand, offsetof(Operand, data)) + ";");
  writer_.line("cvta.to.global.u64 " + first + ", " + first + ";");
  writer_.line("mad.lo.s64 " + first + ", %place, " + size + ", " + first + ";");
  writer_.line("setp.eq.s64 " + vector_predicate(operand) + ", " + stride + ", 1;");
  require_aligned(operand, first);
}

// Leaves the vectors to an operand only where this number of bytes is whole ones.
void VectorProgram::require_aligned(int operand, std::string const& bytes) {
  std::string const is_vector = vector_predicate(operand);
  writer_.line("and.b64 %place, " + bytes + ", " + std::to_string(vector_bytes(operand) - 1) + ";");
  writer_.line("setp.eq.s64 %aligned, %place, 0;");
  writer_.line("and.pred " + is_vector + ", " + is_vector + ", %aligned;");
}

// Where each further piece of a located operand begins. Those that lie in a row begin on a vector's boundary where the
// first does.
void VectorProgram::locate_pieces(int operand) {
  bool const in_rows = piece_dimension_ == kRowDimension;
  std::string const jump = in_rows ? "%jump" : stride_register(operand);
  std::string const from_first =
      ", %place, " + std::to_string(size_of(operand)) + ", " + address_register(operand, 0) + ";";
  if (in_rows) load_stride(jump, operand, kRowDimension);
  for (int piece = 1; piece < layout_.pieces; ++piece) {
    std::string const address = address_register(operand, piece);
    writer_.line("mul.lo.s64 %place, " + offset_register(piece) + ", " + jump + ";");
    writer_.line("mad.lo.s64 " + address + from_first);
    if (in_rows) require_aligned(operand, address);
  }
}

// Beside where each operand begins: how far the next piece is, which have to be gathered piece by piece, and those that
// do not change at all, which are loaded here.
void VectorProgram::locate_line(Mark const& mark) {
  if (mark.arguments.size() != kPosition + 3) {
    throw std::invalid_argument("the kernel's PTX has a cutfuse.locate without a position, two dimensions and a step");
  }
  read_position(mark);
  writer_.line("setp.ne.s32 %gathers, 0, 0;");
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand)) continue;
    locate(operand, std::stoi(mark.arguments[kPosition]));
    measure_step(operand, std::stoi(mark.arguments[kPosition + 1]), mark.arguments[kPosition + 2]);
    std::string const gathers = gather_predicate(operand);
    std::string const end = "$Lchanging" + std::to_string(operand);
    writer_.line("or.b64 %place, " + stride_register(operand) + ", " + step_register(operand) + ";");
    writer_.line("setp.ne.s64 " + gathers + ", %place, 0;");
    writer_.line("@" + gathers + " bra " + end + ";");
    writer_.add(snippets_.load_words(operands_[operand].dtype, layout_.elements),
                {address_register(operand, 0), stride_register(operand)}, words(operand, 0));
    for (int piece = 1; piece < layout_.pieces; ++piece) {
      for (int i = 0; i < words_of(operand); ++i) writer_.move(words(operand, piece)[i], words(operand, 0)[i]);
    }
    writer_.label(end);
    writer_.line("not.pred %loads, " + vector_predicate(operand) + ";");
    writer_.line("and.pred " + gathers + ", " + gathers + ", %loads;");
    writer_.line("or.pred %gathers, %gathers, " + gathers + ";");
  }
}

// The bytes from one piece to the next, which is a vector too where they are whole ones.
void VectorProgram::measure_step(int operand, int dimension, std::string const& count) {
  std::string const step = step_register(operand);
  load_stride(step, operand, dimension);
  writer_.line("cvt.s64.s32 %place, " + count + ";");
  writer_.line("mul.lo.s64 " + step + ", " + step + ", %place;");
  writer_.line("mul.lo.s64 " + step + ", " + step + ", " + std::to_string(size_of(operand)) + ";");
  require_aligned(operand, step);
}

// Has the words of the next piece loaded, if there is one: vectors without a branch, and others behind one that is
// common to all operands.
void VectorProgram::fetch(Mark const& mark) {
  if (mark.arguments.size() != 2) {
    throw std::invalid_argument("the kernel's PTX has a cutfuse.fetch without a piece and whether there is one");
  }
  if (writer_.operand_count() == 0) return;
  int const piece = std::stoi(mark.arguments[0]);
  std::string const number = std::to_string(fetches_++);
  writer_.line("setp.ne.s32 %exists, " + mark.arguments[1] + ", 0;");
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand)) continue;
    writer_.line("and.pred %loads, %exists, " + vector_predicate(operand) + ";");
    load_words(operand, piece, address_register(operand, 0), "@%loads ");
  }
  writer_.line("and.pred %loads, %exists, %gathers;");
  writer_.line("@!%loads bra $Lfetched" + number + ";");
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand)) continue;
    std::string const end = "$Lgathered" + number + "_" + std::to_string(operand);
    writer_.line("@!" + gather_predicate(operand) + " bra " + end + ";");
    writer_.add(snippets_.load_words(operands_[operand].dtype, layout_.elements),
                {address_register(operand, 0), stride_register(operand)}, words(operand, piece));
    writer_.label(end);
  }
  writer_.label("$Lfetched" + number);
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (!writer_.reads_operand(operand)) continue;
    std::string const address = address_register(operand, 0);
    writer_.line("add.s64 " + address + ", " + address + ", " + step_register(operand) + ";");
  }
}

// The neighbours at an address, as vectors.
void VectorProgram::load_words(int operand, int piece, std::string const& address, std::string const& guard) {
  int const width = vector_bytes(operand) / kWordBytes;
  std::vector<std::string> const targets = words(operand, piece);
  for (int first = 0; first < words_of(operand); first += width) {
    writer_.line(guard + "ld.global.v" + std::to_string(width) + ".f32 {" + joined(targets, first, width) + "}, [" +
                 address + "+" + std::to_string(first * kWordBytes) + "];");
  }
}

// Vectors are loaded before anything else, so that all of them are on their way together.
void VectorProgram::load_vectors(int operand) {
  locate(operand, kColumnDimension);
  locate_pieces(operand);
  std::string const end = "$Lvectors" + std::to_string(operand);
  writer_.line("@!" + vector_predicate(operand) + " bra " + end + ";");
  for (int piece = 0; piece < layout_.pieces; ++piece) {
    load_words(operand, piece, address_register(operand, piece), "");
  }
  writer_.label(end);
}

void VectorProgram::load_others(int operand) {
  std::string const end = "$Lloaded" + std::to_string(operand);
  writer_.line("@" + vector_predicate(operand) + " bra " + end + ";");
  for (int piece = 0; piece < layout_.pieces; ++piece) {
    writer_.add(snippets_.load_words(operands_[operand].dtype, layout_.elements),
                {address_register(operand, piece), stride_register(operand)}, words(operand, piece));
  }
  writer_.label(end);
}

std::vector<std::string> VectorProgram::words(int operand, int piece) const {
  std::vector<std::string> registers;
  int const count = words_of(operand);
  registers.reserve(count);
  for (int i = 0; i < count; ++i) registers.push_back(element(word_registers(operand), piece * count + i));
  return registers;
}

void VectorProgram::unpack(int operand, int piece) {
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

void VectorProgram::take_input(std::string const* values, int piece) {
  for (int i = 0; i < layout_.elements; ++i) writer_.move(element(kInputRegisters, i), values[i]);
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand)) unpack(operand, piece);
  }
}

void VectorProgram::compute(Mark const& mark) {
  int const elements = layout_.elements;
  if (mark.arguments.size() != 1 + static_cast<size_t>(elements)) {
    throw std::invalid_argument("the kernel's PTX has a cutfuse.compute of another length than its pieces");
  }
  int const piece = std::stoi(mark.arguments[0]);
  std::string const* const values = &mark.arguments[1];
  take_input(values, piece);
  if (is_short()) {
    for (int i = 0; i < elements; ++i) writer_.write_element(i);
  } else {
    write_passes();
  }
  std::string const results = is_short() ? writer_.results() : kInputRegisters;
  for (int i = 0; i < elements; ++i) writer_.move(values[i], element(results, i));
}

// Gives the loop's label.
std::string VectorProgram::begin_passes() {
  std::string const label = "$Lpass" + std::to_string(loops_++);
  // A constant that ptxas cannot see, as there is no negative number of operands: it unrolls a loop whose count it
  // knows.
  size_t const count = static_cast<size_t>(layout_.program) + offsetof(Program, operand_count);
  writer_.line("ld.param.s32 %passes, [" + parameter_ + "+" + std::to_string(count) + "];");
  writer_.line("shr.s32 %passes, %passes, 31;");
  writer_.line("add.s32 %passes, %passes, " + std::to_string(layout_.elements / kPass) + ";");
  writer_.label(label);
  writer_.line(".pragma \"nounroll\";");
  for (int i = 0; i < kPass; ++i) writer_.write_element(i);
  return label;
}

void VectorProgram::end_passes(std::string const& label) {
  for (int operand = 0; operand < program_.operand_count; ++operand) {
    if (writer_.reads_operand(operand)) writer_.rotate(operand_registers(operand), layout_.elements, kPass);
  }
  writer_.line("add.s32 %passes, %passes, -1;");
  writer_.line("setp.gt.s32 %more, %passes, 0;");
  writer_.line("@%more bra " + label + ";");
}

void VectorProgram::write_passes() {
  int const elements = layout_.elements;
  std::string const label = begin_passes();
  writer_.rotate(kInputRegisters, elements, kPass);
  for (int i = 0; i < kPass; ++i) {
    writer_.move(element(kInputRegisters, elements - kPass + i), element(writer_.results(), i));
  }
  end_passes(label);
}

}  // namespace cutfuse::specialize
