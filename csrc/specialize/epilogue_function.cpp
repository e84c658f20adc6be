#include "specialize/epilogue_function.h"

#include "specialize/program_writer.h"

namespace cutfuse::specialize {
namespace {

// Instructions of PTX, and operands, up to which the program is written once for each element. Longer ones are written
// for a pass of elements, in a loop through whose first registers the fragment is rotated: ptxas takes time in
// proportion to the text, and what a small product waits for is the first fetch of the code. Fragments of four operands
// spill in a kernel with a tile of 128x256; those of three spill up to 92 bytes in four kernels.
constexpr int kMostStraightLine = 2400;
constexpr int kMostFragments = 3;
// A loop holds fragments of this many operands, and loads others in each pass, which is slow: one by one.
constexpr int kMostFragmentsOfPasses = 2;
// Numbers and elements of operands' fragments that stay in registers throughout; further numbers are loaded where they
// are read. Of a program written for each element, and of one written for passes.
constexpr int kMostResident = 64;
constexpr int kMostResidentOfPasses = 40;

class BodyWriter {
 public:
  BodyWriter(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
             EpilogueSignature const& signature)
      : program_(program),
        operands_(operands),
        snippets_(snippets),
        signature_(signature),
        writer_(program, snippets, signature.primitives, {"", "%params", 0}) {}

  ProgramText write() {
    elements_ = is_short() ? kFragment : kPass;
    line(".reg .b64 %params;");
    line(".reg .b32 %m;");
    line(".reg .b32 %n;");
    bool const holds = elements_ == kFragment || writer_.operand_count() <= kMostFragmentsOfPasses;
    operand_elements_ = holds ? kFragment : kPass;
    writer_.declare(kFragment, operand_elements_, elements_);
    read_parameters();
    int const resident = elements_ == kFragment ? kMostResident : kMostResidentOfPasses;
    writer_.load_numbers(resident - (holds ? writer_.operand_count() * kFragment : 0));
    if (holds) load_operands();
    if (elements_ == kFragment) {
      for (int i = 0; i < kFragment; ++i) writer_.write_element(i);
      return_fragment(writer_.results());
    } else {
      write_passes();
      return_fragment(kInputRegisters);
    }
    return writer_.take();
  }

 private:
  bool is_short() const {
    return writer_.instructions() * kFragment <= kMostStraightLine && writer_.operand_count() <= kMostFragments;
  }

  void line(std::string const& text) { writer_.line(text); }

  std::string parameter(int index) const { return signature_.name + "_param_" + std::to_string(index); }

  void read_parameters() {
    line("ld.param.u64 %params, [" + parameter(0) + "];");
    line("ld.param.u32 %m, [" + parameter(1) + "];");
    line("ld.param.u32 %n, [" + parameter(2) + "];");
    for (int i = 0; i < kFragment; ++i) {
      line("ld.param.f32 " + element(kInputRegisters, i) + ", [" + parameter(3) + "+" + std::to_string(4 * i) + "];");
    }
  }

  // Each operand once, before anything is computed, so that the loads of all of them are on their way together: of the
  // fragment, or of one pass.
  void load_operands() {
    for (int operand = 0; operand < program_.operand_count; ++operand) {
      if (!writer_.reads_operand(operand)) continue;
      std::vector<std::string> results;
      results.reserve(operand_elements_);
      for (int i = 0; i < operand_elements_; ++i) results.push_back(element(operand_registers(operand), i));
      DType const dtype = operands_[operand];
      Snippet const& load =
          operand_elements_ == kFragment ? snippets_.load_operand(dtype) : snippets_.load_group(dtype);
      writer_.add(load, {"%params", "%m", "%n", std::to_string(operand)}, results);
    }
  }

  // A pass takes the first registers of the input and leaves its results in the last, so that after all passes every
  // result stands where its element did.
  void rotate() {
    writer_.rotate(kInputRegisters, kFragment, kPass);
    for (int operand = 0; operand_elements_ == kFragment && operand < program_.operand_count; ++operand) {
      if (writer_.reads_operand(operand)) writer_.rotate(operand_registers(operand), kFragment, kPass);
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
    line(".pragma \"nounroll\";");
    if (operand_elements_ == kPass) load_operands();
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

  Program const& program_;
  OperandTypes const& operands_;
  OpSnippets const& snippets_;
  EpilogueSignature const& signature_;
  ProgramWriter writer_;
  int elements_ = 0;          // that the program is written for
  int operand_elements_ = 0;  // of each operand that are in registers
};

}  // namespace

ProgramText write_epilogue_body(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
                                EpilogueSignature const& signature) {
  return BodyWriter(program, operands, snippets, signature).write();
}

}  // namespace cutfuse::specialize
