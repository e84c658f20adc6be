#include "specialize/epilogue_function.h"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "specialize/program_writer.h"
#include "specialize/ptx_text.h"

namespace cutfuse::specialize {
namespace {

// Instructions of PTX, and registers of operands, up to which the program is written once for each element. Longer ones
// are written for a pass of elements, in a loop through whose first registers the fragment is rotated: ptxas takes time
// in proportion to the text, and what a small product waits for is the first fetch of the code. Fragments of four
// matrices spill in a kernel with a tile of 128x256; those of three spill up to 92 bytes in six kernels.
constexpr int kMostStraightLine = 2400;
constexpr int kMostRegisters = 3 * kFragment;
// A loop holds as many, and loads what is left in each pass, which is slow: one by one.
constexpr int kMostRegistersOfPasses = 2 * kFragment;
// Numbers and operands' elements that stay in registers throughout; further numbers are loaded where they are read. Of
// a program written for each element, and of one written for passes.
constexpr int kMostResident = 64;
constexpr int kMostResidentOfPasses = 40;

constexpr char const* kSourceRegisters = "%source_";

class BodyWriter {
 public:
  BodyWriter(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
             EpilogueSignature const& signature)
      : operands_(operands),
        snippets_(snippets),
        signature_(signature),
        writer_(program, snippets, signature.primitives, {"", "%params", 0}) {}

  ProgramText write() {
    check_source();
    elements_ = is_short() ? kFragment : kPass;
    line(".reg .b64 %params;");
    line(".reg .b32 %m;");
    line(".reg .b32 %n;");
    choose_held();
    for (int const operand : writer_.operands_read()) writer_.set_kind(operand, kind_of(operand));
    writer_.declare(kFragment, kFragment, elements_);
    read_parameters();
    writer_.load_numbers((elements_ == kFragment ? kMostResident : kMostResidentOfPasses) - held_registers_);
    load_operands(true);
    if (elements_ == kFragment) {
      unpack_source();
      for (int i = 0; i < kFragment; ++i) writer_.write_element(i);
      return_fragment(writer_.results());
    } else {
      write_passes();
      return_fragment(kInputRegisters);
    }
    return writer_.take();
  }

 private:
  OperandKind kind_of(int operand) const { return operands_[operand].kind; }
  bool is_source(int operand) const { return kind_of(operand) == OperandKind::kSource; }

  // The source; -1 where the program reads none.
  int read_source() const {
    for (int const operand : writer_.operands_read()) {
      if (is_source(operand)) return operand;
    }
    return -1;
  }

  void check_source() const {
    int const source = read_source();
    if (source < 0) return;
    int const bits = 8 * static_cast<int>(size_of(operands_[source].dtype));
    if (signature_.source_words * 32 != kFragment * bits) {
      throw std::invalid_argument("operand " + std::to_string(source) + " has " + std::to_string(bits) +
                                  " bits, and the kernel fetches " + std::to_string(signature_.source_words) +
                                  " words of a source");
    }
  }

  int registers_of(int operand) const {
    return is_source(operand) ? signature_.source_words : distinct_elements(kind_of(operand), kFragment);
  }

  bool is_short() const {
    int registers = 0;
    for (int const operand : writer_.operands_read()) {
      registers += is_source(operand) ? kFragment : registers_of(operand);
    }
    return writer_.instructions() * kFragment <= kMostStraightLine && registers <= kMostRegisters;
  }

  // Everything where the program is straight, and else what takes few registers before strided matrices.
  void choose_held() {
    int const most = elements_ == kFragment ? kMostRegisters : kMostRegistersOfPasses;
    for (bool const takes_strided : {false, true}) {
      for (int const operand : writer_.operands_read()) {
        bool const is_strided = kind_of(operand) == OperandKind::kStrided;
        if (is_strided != takes_strided) continue;
        held_[operand] = !is_strided || held_registers_ + registers_of(operand) <= most;
        if (held_[operand]) held_registers_ += registers_of(operand);
      }
    }
  }

  void line(std::string const& text) { writer_.line(text); }

  std::string parameter(int index) const { return signature_.name + "_param_" + std::to_string(index); }

  void read_parameters() {
    line("ld.param.u64 %params, [" + parameter(0) + "];");
    line("ld.param.u32 %m, [" + parameter(1) + "];");
    line("ld.param.u32 %n, [" + parameter(2) + "];");
    read_fragment(kInputRegisters, kFragment, parameter(3));
    int const source = read_source();
    if (source < 0) return;
    if (is_packed(source)) writer_.declare_floats(kSourceRegisters, signature_.source_words);
    read_fragment(is_packed(source) ? kSourceRegisters : operand_registers(source), signature_.source_words,
                  parameter(4));
  }

  void read_fragment(std::string const& registers, int words, std::string const& from) {
    for (int i = 0; i < words; ++i) {
      line("ld.param.f32 " + element(registers, i) + ", [" + from + "+" + std::to_string(4 * i) + "];");
    }
  }

  // Whether a word of the source holds two elements.
  bool is_packed(int source) const { return size_of(operands_[source].dtype) == 2; }

  // The source's elements for which the program is written, from its first words.
  void unpack_source() {
    int const source = read_source();
    if (source < 0 || !is_packed(source)) return;
    constexpr int kMost = 8;  // elements that are unpacked at once
    for (int first = 0; first < elements_; first += kMost) {
      int const count = std::min(kMost, elements_);
      writer_.add(snippets_.unpack(operands_[source].dtype, count), elements(kSourceRegisters, first / 2, count / 2),
                  elements(operand_registers(source), first, count));
    }
  }

  // All that are held, once and before anything is computed, so that their loads are on their way together; or those of
  // one pass.
  void load_operands(bool held) {
    for (int const operand : writer_.operands_read()) {
      if (held_[operand] == held && !is_source(operand)) load_operand(operand);
    }
  }

  void load_operand(int operand) {
    auto const& [dtype, kind] = operands_[operand];
    int const count = held_[operand] ? registers_of(operand) : kPass;
    std::vector<std::string> const results = elements(operand_registers(operand), 0, count);
    std::string const index = std::to_string(operand);
    auto const beside = [&](char const* what) -> Snippet const& {
      return signature_.is_staged ? snippets_.load_staged(what) : snippets_.load(what, dtype);
    };
    switch (kind) {
      case OperandKind::kScalar:
        return writer_.add(beside("scalar"), {"%params", index}, results);
      case OperandKind::kColumn:
        return writer_.add(beside("column"), {"%params", "%m", index}, results);
      case OperandKind::kRow:
        return writer_.add(beside("row"), {"%params", "%n", index}, results);
      default:
        return writer_.add(snippets_.load(held_[operand] ? "operand" : "group", dtype), {"%params", "%m", "%n", index},
                           results);
    }
  }

  // A pass takes the first registers of the input and leaves its results in the last, so that after all passes every
  // result stands where its element did.
  void rotate() {
    writer_.rotate(kInputRegisters, kFragment, kPass);
    for (int const operand : writer_.operands_read()) {
      if (!held_[operand]) continue;
      if (is_source(operand) && is_packed(operand)) {
        writer_.rotate(kSourceRegisters, signature_.source_words, kPass / 2);
      } else if (kind_of(operand) != OperandKind::kScalar && kind_of(operand) != OperandKind::kColumn) {
        int const count = registers_of(operand);
        writer_.rotate(operand_registers(operand), count, count * kPass / kFragment);
      }
    }
    for (int i = 0; i < kPass; ++i) {
      writer_.move(element(kInputRegisters, kFragment - kPass + i), element(writer_.results(), i));
    }
  }

  void write_passes() {
    line(".reg .b32 %passes;");
    line(".reg .pred %more;");
    // A constant that ptxas cannot see, as n is never negative: it unrolls a loop whose count it knows.
    line("shr.s32 %passes, %n, 31;");
    line("add.s32 %passes, %passes, " + std::to_string(kFragment / kPass) + ";");
    writer_.label("$Lpass");
    line(std::string(kKeptLoop));
    load_operands(false);
    unpack_source();
    for (int i = 0; i < kPass; ++i) writer_.write_element(i);
    rotate();
    line("add.s32 %n, %n, " + std::to_string(kColumnsPerPass) + ";");
    line("add.s32 %passes, %passes, -1;");
    line("setp.gt.s32 %more, %passes, 0;");
    line("@%more bra $Lpass;");
  }

  void return_fragment(std::string const& registers) {
    for (int i = 0; i < kFragment; ++i) {
      line("st.param.f32 [" + signature_.result + "+" + std::to_string(4 * i) + "], " + element(registers, i) + ";");
    }
    line("ret;");
  }

  OperandTypes const& operands_;
  OpSnippets const& snippets_;
  EpilogueSignature const& signature_;
  ProgramWriter writer_;
  int elements_ = 0;  // that the program is written for
  std::array<bool, kMaxOperands> held_ = {};
  int held_registers_ = 0;
};

}  // namespace

ProgramText write_epilogue_body(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
                                EpilogueSignature const& signature) {
  return BodyWriter(program, operands, snippets, signature).write();
}

}  // namespace cutfuse::specialize
