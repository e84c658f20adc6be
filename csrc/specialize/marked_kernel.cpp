#include "specialize/marked_kernel.h"

#include <algorithm>
#include <cctype>
#include <memory>
#include <stdexcept>

#include "specialize/backward_program.h"
#include "specialize/operand_loads.h"
#include "specialize/ptx_text.h"
#include "specialize/vector_program.h"

namespace cutfuse::specialize {
namespace {

constexpr std::string_view kMark = "cutfuse.";
constexpr std::string_view kBlocks = ".minnctapersm ";
constexpr std::string_view kThreads = ".maxntid ";

[[noreturn]] void refuse(std::string const& why) { throw std::invalid_argument("the kernel's PTX " + why); }

// Registers and numbers, whatever braces and commas stand between them.
std::vector<std::string> arguments_of(std::string_view text) {
  std::vector<std::string> arguments;
  auto const belongs = [](char c) { return is_name_character(c) || c == '%'; };
  while (!text.empty()) {
    auto const* const end = std::find_if_not(text.begin(), text.end(), belongs);
    auto const length = static_cast<size_t>(end - text.begin());
    if (length > 0) arguments.emplace_back(text.substr(0, length));
    text.remove_prefix(std::min(text.size(), length + 1));
  }
  return arguments;
}

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

}  // namespace

bool MarkedKernel::is_marked(std::string_view ptx) { return ptx.find(kMark) != std::string_view::npos; }

MarkedKernel::MarkedKernel(std::string_view ptx) {
  texts_.emplace_back();
  for (std::string_view const line : lines_of(ptx)) {
    std::string_view const text = trimmed(line);
    if (starts_with(text, kMark)) {
      std::string_view const opcode = opcode_of(text);
      marks_.push_back({std::string(opcode), arguments_of(text.substr(opcode.size()))});
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
