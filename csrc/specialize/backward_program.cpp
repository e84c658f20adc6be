#include "specialize/backward_program.h"

#include <memory>
#include <stdexcept>

namespace cutfuse::specialize {
namespace {

// Where long programs keep the tangents of a piece's elements.
std::string kept_registers(int w) { return "%kept" + std::to_string(w) + "_"; }

void check_length(Mark const& mark, int elements) {
  if (mark.arguments.size() == 1 + static_cast<size_t>(elements)) return;
  throw std::invalid_argument("the kernel's PTX has a " + mark.opcode + " of another length than its pieces");
}

}  // namespace

BackwardProgram::BackwardProgram(MarkedLayout const& layout, std::string const& parameter, Program const& program,
                                 OperandTypes const& operands, OpSnippets const& snippets, Inputs const& wrt,
                                 bool sums_columns)
    : VectorProgram(layout, parameter, program, operands, snippets,
                    std::make_unique<DerivativeWriter>(program, snippets, layout.primitives,
                                                       layout.program_address(parameter), wrt)),
      sums_columns_(sums_columns),
      derivatives_(static_cast<DerivativeWriter&>(writer_)) {}

void BackwardProgram::declare_program() {
  derivatives_.declare_all(elements(), elements(), is_short() ? elements() : kPass);
  if (is_short()) return;
  for (int w = 0; w < derivatives_.derivative_count(); ++w) writer_.declare_floats(kept_registers(w), elements());
}

// The second input of the pieces, the gradients that arrive, and tangents; in a loop over rows also sums, and what is
// kept of each tensor.
int BackwardProgram::own_registers() const {
  constexpr int kPieceWords = 4;
  constexpr int kOfLoop = 8;
  int const tensors = derivatives_.operand_count() + derivatives_.derivative_count();
  return elements() * (1 + derivatives_.derivative_count()) + pieces() * kPieceWords +
         (sums_columns_ ? kOfLoop * tensors : 0);
}

bool BackwardProgram::write_program(Mark const& mark) {
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

void BackwardProgram::differentiate(Mark const& mark) {
  check_length(mark, elements());
  take_input(&mark.arguments[1], std::stoi(mark.arguments[0]));
  if (!is_short()) write_passes();
}

void BackwardProgram::write_passes() {
  // ptxas takes a register that nothing has set before a loop for any value, and behind the loop too: it lost tangents
  // that are the same in each pass.
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

// Of a derivative that is not wanted the kernel runs no mark. In a short program the first one computes all of them: an
// element that is done before the next one begins leaves its masks in predicates, of which a thread has seven.
void BackwardProgram::multiply(Mark const& mark) {
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

}  // namespace cutfuse::specialize
