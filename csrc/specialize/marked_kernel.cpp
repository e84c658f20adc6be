#include "specialize/marked_kernel.h"

#include <algorithm>
#include <cctype>
#include <memory>
#include <stdexcept>

#include "specialize/derivative_writer.h"
#include "specialize/ptx_text.h"

namespace cutfuse::specialize {
namespace {

constexpr std::string_view kMark = "cutfuse.";
constexpr std::string_view kBlocks = ".minnctapersm ";
constexpr std::string_view kThreads = ".maxntid ";

int number_in(std::string const& text) {
  bool const is_number =
      !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  if (!is_number) refuse("has '" + text + "' in cutfuse.layout, and not a number");
  return std::stoi(text);
}

// The number behind a directive.
int directive(std::string_view text, std::string_view name) {
  size_t const at = text.find(name);
  if (at == std::string_view::npos) refuse("has no '" + std::string(name) + "'");
  return std::stoi(std::string(text.substr(at + name.size(), 8)));
}

// ptxas is told how many blocks are to have room, which says how many registers there are.
std::string with_blocks(std::string text, int blocks) {
  size_t const start = text.find(kBlocks) + kBlocks.size();
  return text.replace(start, text.find('\n', start) - start, std::to_string(blocks));
}

// Multiplies a piece's gradients by a derivative; a kernel has these marks for all derivatives there may be.
constexpr char const* kDerivativeMark = "cutfuse.derivative";

// Instructions of PTX up to which the program is written once for each element of a thread. Longer ones are written for
// a pass of elements, in a loop through whose first registers each piece is rotated: see epilogue_function.cpp.
constexpr int kMostStraightLine = 2400;

void check_length(Mark const& mark, int elements) {
  if (mark.arguments.size() == 1 + static_cast<size_t>(elements)) return;
  refuse("has a " + mark.opcode + " of another length than its pieces");
}

// A program in the marks of a kernel: for pieces of aligned rows, whose operands are loaded ahead.
class VectorProgram {
 public:
  // parameter: the kernel's, whose layout is given.
  VectorProgram(MarkedLayout const& layout, std::string const& parameter, Program const& program,
                OperandTypes const& operands, OpSnippets const& snippets)
      : VectorProgram(
            layout, parameter, operands, snippets,
            std::make_unique<ProgramWriter>(program, snippets, layout.primitives, layout.program_address(parameter))) {}
  virtual ~VectorProgram() = default;

  // What takes the place of a mark. The first is cutfuse.layout.
  std::string write(Mark const& mark) {
    if (mark.opcode == "cutfuse.layout") {
      declare();
    } else if (!loads_.write(mark) && !write_program(mark)) {
      refuse("has an unknown mark " + mark.opcode);
    }
    return writer_.take_text();
  }

  // The tables that all of it reads.
  std::vector<std::string> globals() { return writer_.take().globals; }

  // Blocks of a multiprocessor that have the registers it needs.
  int blocks(int threads) const {
    constexpr int kRegisters = 65536;  // of a multiprocessor
    constexpr int kOfLongOps = 16;     // erfc of two elements at once: spills without them
    constexpr int kLongOp = 64;        // instructions
    int held = layout_.registers + own_registers() + (longest_snippet() > kLongOp ? kOfLongOps : 0);
    for (int const operand : writer_.operands_read()) {
      held += loads_.registers_of(operand);
      if (!is_short()) held += layout_.elements;
    }
    return std::max(1, kRegisters / (threads * held));
  }

 protected:
  // The program as `writer` writes it.
  VectorProgram(MarkedLayout const& layout, std::string parameter, OperandTypes const& operands,
                OpSnippets const& snippets, std::unique_ptr<ProgramWriter> writer)
      : layout_(layout),
        parameter_(std::move(parameter)),
        owned_(std::move(writer)),
        writer_(*owned_),
        loads_(layout, parameter_, operands, snippets, writer_) {}

  virtual void declare_program() {
    writer_.declare(layout_.elements, layout_.elements, is_short() ? layout_.elements : kPass);
  }
  virtual int element_instructions() const { return writer_.instructions(); }
  virtual int longest_snippet() const { return writer_.longest_op(); }
  // Registers of a thread beside those of operands.
  virtual int own_registers() const { return layout_.elements; }
  // The marks of the program itself; false for another one.
  virtual bool write_program(Mark const& mark) {
    if (mark.opcode != "cutfuse.compute") return false;
    compute(mark);
    return true;
  }

  bool is_short() const { return element_instructions() * layout_.elements * layout_.pieces <= kMostStraightLine; }
  int elements() const { return layout_.elements; }
  int pieces() const { return layout_.pieces; }

  static constexpr int kPass = 2;  // elements of a pass

  // A piece's input and operands, as the program reads them.
  void take_input(std::string const* values, int piece) {
    for (int i = 0; i < layout_.elements; ++i) writer_.move(element(kInputRegisters, i), values[i]);
    loads_.unpack(piece);
  }

  // A loop over passes through whose first registers a piece is rotated: its program and operands. Gives the loop's
  // label.
  std::string begin_passes() {
    std::string const label = "$Lpass" + std::to_string(loops_++);
    // A constant that ptxas cannot see, as there is no negative number of operands: it unrolls a loop whose count it
    // knows.
    size_t const count = static_cast<size_t>(layout_.program) + offsetof(Program, operand_count);
    writer_.line("ld.param.s32 %passes, [" + parameter_ + "+" + std::to_string(count) + "];");
    writer_.line("shr.s32 %passes, %passes, 31;");
    writer_.line("add.s32 %passes, %passes, " + std::to_string(layout_.elements / kPass) + ";");
    writer_.label(label);
    writer_.line(std::string(kKeptLoop));
    for (int i = 0; i < kPass; ++i) writer_.write_element(i);
    return label;
  }

  void end_passes(std::string const& label) {
    for (int const operand : writer_.operands_read()) {
      writer_.rotate(operand_registers(operand), layout_.elements, kPass);
    }
    writer_.line("add.s32 %passes, %passes, -1;");
    writer_.line("setp.gt.s32 %more, %passes, 0;");
    writer_.line("@%more bra " + label + ";");
  }

 private:
  void declare() {
    declare_program();
    writer_.line(".reg .b32 %passes;");
    writer_.line(".reg .pred %more;");
    loads_.declare();
    // All numbers: they are in the constant bank, from which an instruction takes its argument without a register.
    writer_.load_numbers(writer_.number_count());
  }

  void compute(Mark const& mark) {
    check_length(mark, elements());
    std::string const* const values = &mark.arguments[1];
    take_input(values, std::stoi(mark.arguments[0]));
    if (is_short()) {
      for (int i = 0; i < elements(); ++i) writer_.write_element(i);
    } else {
      write_passes();
    }
    std::string const results = is_short() ? writer_.results() : kInputRegisters;
    for (int i = 0; i < elements(); ++i) writer_.move(values[i], element(results, i));
  }

  void write_passes() {
    std::string const label = begin_passes();
    writer_.rotate(kInputRegisters, elements(), kPass);
    for (int i = 0; i < kPass; ++i) {
      writer_.move(element(kInputRegisters, elements() - kPass + i), element(writer_.results(), i));
    }
    end_passes(label);
  }

  MarkedLayout const layout_;
  std::string const parameter_;
  std::unique_ptr<ProgramWriter> const owned_;
  int loops_ = 0;  // that have been written, each with a label of its own

 protected:
  ProgramWriter& writer_;

 private:
  OperandLoads loads_;
};

// Where long programs keep the tangents of a piece's elements.
std::string kept_registers(int w) { return "%kept" + std::to_string(w) + "_"; }

// A program's derivatives in the marks of a kernel: see backward_templates.cu.
class BackwardProgram final : public VectorProgram {
 public:
  BackwardProgram(MarkedLayout const& layout, std::string const& parameter, Program const& program,
                  OperandTypes const& operands, OpSnippets const& snippets, Inputs const& wrt, bool sums_columns)
      : VectorProgram(layout, parameter, operands, snippets,
                      std::make_unique<DerivativeWriter>(program, snippets, layout.primitives,
                                                         layout.program_address(parameter), wrt)),
        sums_columns_(sums_columns),
        derivatives_(static_cast<DerivativeWriter&>(writer_)) {}

 private:
  void declare_program() override {
    derivatives_.declare_all(elements(), elements(), is_short() ? elements() : kPass);
    if (is_short()) return;
    for (int w = 0; w < derivatives_.derivative_count(); ++w) writer_.declare_floats(kept_registers(w), elements());
  }

  int element_instructions() const override { return derivatives_.element_instructions(); }
  int longest_snippet() const override { return derivatives_.longest_snippet(); }

  // The second input of the pieces, the gradients that arrive, and tangents; in a loop over rows also sums, and what is
  // kept of each tensor.
  int own_registers() const override {
    constexpr int kPieceWords = 4;
    constexpr int kOfLoop = 8;
    int const tensors = static_cast<int>(derivatives_.operands_read().size()) + derivatives_.derivative_count();
    return elements() * (1 + derivatives_.derivative_count()) + pieces() * kPieceWords +
           (sums_columns_ ? kOfLoop * tensors : 0);
  }

  bool write_program(Mark const& mark) override {
    if (mark.opcode == "cutfuse.differentiate") {
      differentiate(mark);
    } else if (mark.opcode == kDerivativeMark) {
      multiply(mark);
    } else if (mark.opcode == "cutfuse.count") {
      writer_.line("mov.u32 " + mark.arguments.at(0) + ", " + std::to_string(derivatives_.derivative_count()) + ";");
    } else {
      return false;
    }
    return true;
  }

  void differentiate(Mark const& mark) {
    check_length(mark, elements());
    take_input(&mark.arguments[1], std::stoi(mark.arguments[0]));
    if (!is_short()) write_passes();
  }

  void write_passes() {
    // ptxas takes a register that nothing has set before a loop for any value, and behind the loop too: it lost
    // tangents that are the same in each pass.
    for (int w = 0; w < derivatives_.derivative_count(); ++w) {
      for (int i = 0; i < elements(); ++i) writer_.move(element(kept_registers(w), i), "0f00000000");
    }
    std::string const label = begin_passes();
    writer_.rotate(kInputRegisters, elements(), kPass);
    for (int w = 0; w < derivatives_.derivative_count(); ++w) {
      std::string const kept = kept_registers(w);
      writer_.rotate(kept, elements(), kPass);
      for (int i = 0; i < kPass; ++i) derivatives_.keep_tangent(w, i, element(kept, elements() - kPass + i));
    }
    end_passes(label);
  }

  // Of a derivative that is not wanted the kernel runs no mark. In a short program the first one computes all of them:
  // an element that is done before the next one begins leaves its masks in predicates, of which a thread has seven.
  void multiply(Mark const& mark) {
    check_length(mark, elements());
    int const w = std::stoi(mark.arguments[0]);
    if (w >= derivatives_.derivative_count()) return;
    for (int i = 0; i < elements(); ++i) {
      std::string const& gradient = mark.arguments[1 + static_cast<size_t>(i)];
      if (is_short()) {
        if (w == 0) writer_.write_element(i);
        derivatives_.multiply_gradient(w, i, gradient);
      } else {
        derivatives_.multiply_gradient_kept(w, element(kept_registers(w), i), gradient);
      }
    }
  }

  bool const sums_columns_;
  DerivativeWriter& derivatives_;  // the base's writer
};

}  // namespace

bool MarkedKernel::is_marked(std::string_view ptx) { return ptx.find(kMark) != std::string_view::npos; }

MarkedKernel::MarkedKernel(std::string_view ptx) {
  texts_.emplace_back();
  for (std::string_view const line : lines_of(ptx)) {
    std::string_view const text = trimmed(line);
    if (starts_with(text, kMark)) {
      std::string_view const opcode = opcode_of(text);
      marks_.push_back({std::string(opcode), names_in(text.substr(opcode.size()))});
      texts_.emplace_back();
    } else {
      texts_.back().append(line).append("\n");
    }
  }
  read_layout();
}

void MarkedKernel::read_layout() {
  constexpr size_t kNumbers = 6;
  constexpr int kRegisters = 40;  // where no number says how many
  int numbers[kNumbers] = {0, 0, 0, 0, 0, kRegisters};
  size_t const given = marks_.empty() || marks_[0].opcode != "cutfuse.layout" ? 0 : marks_[0].arguments.size();
  if (given != kNumbers && given != kNumbers - 1) refuse("does not begin with a cutfuse.layout of 5 or 6 numbers");
  std::transform(marks_[0].arguments.begin(), marks_[0].arguments.end(), numbers, number_in);
  layout_ = {numbers[0],
             numbers[1],
             numbers[2],
             numbers[3],
             numbers[4] != 0 ? Primitives::kFast : Primitives::kAccurate,
             numbers[5],
             has_mark(kLocateMark)};
  directive(texts_[0], kBlocks);
  directive(texts_[0], kThreads);
}

bool MarkedKernel::has_mark(std::string_view opcode) const {
  return std::any_of(marks_.begin(), marks_.end(), [&](Mark const& mark) { return mark.opcode == opcode; });
}

ProgramText MarkedKernel::specialize(std::string const& kernel, Inputs const& wrt, Program const& program,
                                     OperandTypes const& operands, OpSnippets const& snippets) const {
  if (has_mark(kDerivativeMark) == wrt.empty()) {
    refuse(wrt.empty() ? "is of derivatives, and none is asked for" : "has no marks of derivatives");
  }
  std::string const parameter = kernel + "_param_0";
  std::unique_ptr<VectorProgram> const vectors =
      wrt.empty() ? std::make_unique<VectorProgram>(layout_, parameter, program, operands, snippets)
                  : std::make_unique<BackwardProgram>(layout_, parameter, program, operands, snippets, wrt,
                                                      has_mark(kLoadRowsMark));
  int const most = directive(texts_[0], kBlocks);
  int const blocks = vectors->blocks(directive(texts_[0], kThreads));
  ProgramText result;
  result.text = with_blocks(texts_[0], std::min(blocks, most));
  for (size_t k = 0; k < marks_.size(); ++k) result.text += vectors->write(marks_[k]) + texts_[k + 1];
  result.globals = vectors->globals();
  return result;
}

}  // namespace cutfuse::specialize
