#include "specialize/kernel_text.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "epilogue/ops.h"
#include "specialize/ptx_text.h"

namespace cutfuse::specialize {
namespace {

constexpr std::string_view kStaged = "// operands are staged";
constexpr std::string_view kPreActivation = "// address of the pre-activation";
constexpr std::string_view kReduction = "// reduction of the rows";
constexpr std::string_view kReduceRows = "reduce_rows";
constexpr int kWordBytes = 4;
constexpr int kFragmentBytes = kFragment * kWordBytes;
// Instructions of PTX but moves, in all of a kernel's calls, up to which a program is put in their place. A call passes
// 16 elements and gives 16 back, and stands between a subtile's product and its store: on an H200, 12608x3072x768 in
// bf16 takes 90 us without a call, 104 with one of relu.
constexpr int kMostInlined = 6000;

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

// A GEMM kernel's PTX with what is known of every launch in the place of what the kernel would ask for.
std::string gemm_text(std::string_view ptx, GemmVariant const& variant) {
  std::string text(ptx);
  if (!variant.stores_pre_activation) text = with_number(text, kPreActivation, 0);
  if (variant.reduction == Reduction::kNone) return text;
  if (text.find(kReduction) == std::string::npos) refuse("does not say where it asks for the reduction");
  return with_reduction_inlined(with_number(text, kReduction, static_cast<int>(variant.reduction)));
}

size_t require(std::string_view text, std::string_view wanted, size_t from, char const* meaning) {
  size_t const at = text.find(wanted, from);
  if (at == std::string_view::npos) refuse(std::string("has no ") + meaning + " ('" + std::string(wanted) + "')");
  return at;
}

// The text of a kernel of any device for those of sm_90 and later. GEMM kernels are of these alone, and wait.
std::string with_early_launch(std::string text) {
  constexpr std::string_view kEveryTarget = ".target sm_80";
  text.replace(require(text, kEveryTarget, 0, "target"), kEveryTarget.size(), ".target sm_90");
  size_t const body = require(text, "{", require(text, ".entry ", 0, "kernel"), "body") + 1;
  return text.insert(body, "\n\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;");
}

FunctionPlace find_epilogue(std::string_view ptx) {
  FunctionPlace const place = find_function(ptx, "run_epilogue");
  if (place.start != std::string_view::npos) return place;
  refuse(place.is_declared ? "declares run_epilogue, but has no body of it" : "has no function run_epilogue");
}

std::string name_after(std::string_view text, size_t at) {
  text.remove_prefix(at);
  return std::string(text.substr(0, name_length(text)));
}

// How many bytes the fragment in a parameter has; 0 where there is no such parameter.
int fragment_bytes(std::string_view head, std::string const& parameter) {
  size_t const at = head.find(parameter + "[");
  return at == std::string_view::npos ? 0 : number_at(head.substr(at + parameter.size() + 1));
}

void check_parameters(std::string_view head, std::string const& name) {
  for (int index = 0; index < 4; ++index) {
    std::string const parameter = name + "_param_" + std::to_string(index);
    if (find_name(head, parameter) == std::string_view::npos) refuse("has no parameter " + parameter);
  }
  if (fragment_bytes(head, name + "_param_3") != kFragmentBytes) refuse("passes no fragment of 64 bytes");
}

// A source of 16 bits or of 32.
int read_source_words(std::string_view head, std::string const& name) {
  std::string const parameter = name + "_param_4";
  if (find_name(head, parameter) == std::string_view::npos) return 0;
  int const bytes = fragment_bytes(head, parameter);
  if (bytes != kFragmentBytes && bytes != kFragmentBytes / 2) {
    refuse("gives run_epilogue a fifth parameter that is no fragment of 32 or 64 bytes");
  }
  if (find_name(head, name + "_param_5") != std::string_view::npos) refuse("gives run_epilogue a sixth parameter");
  return bytes / kWordBytes;
}

EpilogueSignature read_signature(std::string_view head) {
  size_t const result = require(head, " func_retval", 0, "result of run_epilogue") + 1;
  size_t const name = head.find_first_not_of(" \t\n", require(head, ")", result, "result of run_epilogue") + 1);
  EpilogueSignature signature = {name_after(head, name), name_after(head, result), Primitives::kFast, 0, false};
  if (head.find(signature.result + "[64]") == std::string_view::npos) refuse("returns no fragment of 64 bytes");
  check_parameters(head, signature.name);
  signature.source_words = read_source_words(head, signature.name);
  bool const is_fast = signature.name.find("FastPrimitives") != std::string::npos;
  bool const is_accurate = signature.name.find("AccuratePrimitives") != std::string::npos;
  if (is_fast == is_accurate) refuse("does not say in " + signature.name + " which primitives it is compiled with");
  if (is_accurate) signature.primitives = Primitives::kAccurate;
  return signature;
}

// Instructions of a function's body that do more than move a register.
int count_instructions(std::string_view body) {
  int count = 0;
  for (std::string_view const line : lines_of(body)) {
    std::string_view const instruction = instruction_of(line);
    if (!instruction.empty() && !starts_with(instruction, "mov.")) ++count;
  }
  return count;
}

}  // namespace

KernelText::KernelText(std::string_view given, Inputs wrt, GemmVariant const& variant) : wrt_(std::move(wrt)) {
  std::string const own = MarkedKernel::is_marked(given) ? std::string() : gemm_text(given, variant);
  std::string_view const ptx = own.empty() ? given : own;
  constexpr std::string_view kEntry = ".entry ";
  kernel_ = name_after(ptx, require(ptx, kEntry, 0, "kernel") + kEntry.size());
  size_t const head_end = ptx.find('\n', require(ptx, ".address_size", 0, "header"));
  head_ = ptx.substr(0, head_end + 1);
  if (MarkedKernel::is_marked(ptx)) {
    marked_.emplace(ptx.substr(head_.size()));
    return;
  }
  FunctionPlace const place = find_epilogue(ptx);
  if (place.close == std::string_view::npos) refuse("ends inside run_epilogue");
  epilogue_ = read_signature(ptx.substr(place.start, place.open - place.start));
  epilogue_.is_staged = ptx.find(kStaged) != std::string_view::npos;
  before_ = ptx.substr(head_.size(), place.open + 1 - head_.size());
  after_ = ptx.substr(place.close);
  rest_ = without_declarations(ptx.substr(head_.size() - 1, place.start - head_.size() + 1), epilogue_.name);
  rest_ += after_.substr(1);
  call_count_ = count_calls(rest_, epilogue_.name);
}

// Matrices that are loaded stay in a function: in the kernel's own text ptxas begins their loads so early that they
// spill.
bool KernelText::is_inlined(std::string_view body, Program const& program, OperandTypes const& operands) const {
  bool const loads_matrix = std::any_of(operands.begin(), operands.begin() + program.operand_count,
                                        [](auto const& own) { return own.kind == OperandKind::kStrided; });
  if (loads_matrix || call_count_ == 0 || !is_straight(body)) return false;
  return count_instructions(body) * call_count_ <= kMostInlined;
}

std::string KernelText::name_with(Program const& program) const {
  constexpr size_t kLongest = 200;
  std::string name = derivative_kernel(kernel_, wrt_) + "_";
  for (int index = 0; index < program.length && name.size() < kLongest; ++index) {
    name += std::string(program.instructions[index].is_eager != 0 ? "_eager_" : "_") +
            kOps[program.instructions[index].op].name;
  }
  return name;
}

std::string KernelText::specialize(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
                                   bool launches_early, bool inlines) const {
  ProgramText body = marked_ ? marked_->specialize(kernel_, wrt_, program, operands, snippets)
                             : write_epilogue_body(program, operands, snippets, epilogue_);
  std::string text = head_;
  for (std::string const& global : body.globals) {
    if (find_name(before_, global) == std::string_view::npos) text += snippets.declaration_of(global) + "\n";
  }
  std::string const name = name_with(program);
  if (marked_) {
    text += replace_all(body.text, kernel_, name);
    return launches_early ? with_early_launch(std::move(text)) : text;
  }
  if (inlines && is_inlined(body.text, program, operands)) {
    return text + replace_all(with_inlined_calls(rest_, {epilogue_.name, epilogue_.result, body.text}), kernel_, name);
  }
  return text + replace_all(before_, kernel_, name) + "\n" + body.text + replace_all(after_, kernel_, name);
}

}  // namespace cutfuse::specialize
