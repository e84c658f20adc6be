#include "specialize/gemm_text.h"

#include <stdexcept>

#include "specialize/inlined_calls.h"
#include "specialize/ptx_text.h"

namespace cutfuse::specialize {
namespace {

constexpr std::string_view kPreActivation = "// address of the pre-activation";
constexpr std::string_view kReduction = "// reduction of the rows";
constexpr std::string_view kReduceRows = "reduce_rows";

[[noreturn]] void refuse(std::string_view why) { throw std::invalid_argument("the kernel's PTX " + std::string(why)); }

// The text with a number in the place of what each mark's register has: "mov.b32 %r1, %r1; // the mark".
std::string with_number(std::string_view ptx, std::string_view mark, int number) {
  constexpr std::string_view kMove = "mov.b";
  std::string text;
  for (std::string_view const line : lines_of(ptx)) {
    size_t const move = line.find(mark) == std::string_view::npos ? std::string_view::npos : line.find(kMove);
    if (move == std::string_view::npos) {
      text.append(line);
    } else {
      text.append("\t").append(line.substr(move, line.find(',', move) - move));
      text.append(", ").append(std::to_string(number)).append(";");
    }
    text += '\n';
  }
  return text;
}

// The text with the function that folds a fragment into the rows' states in the place of its calls. As a function it
// takes 16 elements and asks for the reduction: 12608x3072x768 bf16 with a sum takes 115 us, 90 without one (H200).
std::string with_reduction_inlined(std::string_view ptx) {
  FunctionPlace const place = find_function(ptx, kReduceRows);
  if (place.start == std::string_view::npos) refuse("has no function reduce_rows");
  std::string_view const head = ptx.substr(place.start, place.open - place.start);
  std::string const name = function_name(head);
  std::string_view const body = ptx.substr(place.open + 1, place.close - place.open - 1);
  if (name.empty() || !is_straight(body)) refuse("has a function reduce_rows that cannot stand in its calls' place");
  std::string const rest = std::string(ptx.substr(0, place.start)) + std::string(ptx.substr(place.close + 1));
  return with_inlined_calls(without_declarations(rest, name), {name, "", body});
}

}  // namespace

std::string gemm_text(std::string_view ptx, GemmVariant const& variant) {
  std::string text(ptx);
  if (!variant.stores_pre_activation) text = with_number(text, kPreActivation, 0);
  if (variant.reduction == Reduction::kNone) return text;
  if (text.find(kReduction) == std::string::npos) refuse("does not say where it asks for the reduction");
  return with_reduction_inlined(with_number(text, kReduction, static_cast<int>(variant.reduction)));
}

}  // namespace cutfuse::specialize
