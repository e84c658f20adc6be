#include "specialize/kernel_variant.h"

#include "specialize/ptx_text.h"

namespace cutfuse::specialize {

namespace {

constexpr std::string_view kSuffix = "_d";
constexpr std::string_view kStoresSuffix = "_z";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Reductions of one fold have the same kernel.
std::string suffix_of(Reduction reduction) { return std::string("_") + name_of(first_of(info_of(reduction).fold)); }

}  // namespace

std::string derivative_kernel(std::string_view kernel_template, Inputs const& wrt) {
  std::string name(kernel_template);
  if (!wrt.empty()) name += kSuffix;
  for (int const input : wrt) name += static_cast<char>('0' + input);
  return name;
}

std::string variant_kernel(std::string_view kernel_template, GemmVariant const& variant) {
  std::string name(kernel_template);
  if (variant.reduction != Reduction::kNone) name += suffix_of(variant.reduction);
  if (variant.stores_pre_activation) name += kStoresSuffix;
  return name;
}

KernelName read_kernel_name(std::string_view kernel) {
  if (ends_with(kernel, kStoresSuffix)) return {kernel.substr(0, kernel.size() - kStoresSuffix.size()), {}, {}};
  for (ReductionInfo const& info : kReductions) {
    std::string const suffix = suffix_of(info.code);
    if (info.code == Reduction::kNone || !ends_with(kernel, suffix)) continue;
    return {kernel.substr(0, kernel.size() - suffix.size()), {}, {false, info.code}};
  }
  size_t end = kernel.size();
  while (end > 0 && is_digit(kernel[end - 1])) --end;
  bool const has_suffix =
      end < kernel.size() && end > kSuffix.size() && kernel.substr(end - kSuffix.size(), kSuffix.size()) == kSuffix;
  if (!has_suffix) return {kernel, {}, {false}};
  KernelName name = {kernel.substr(0, end - kSuffix.size()), {}, {false}};
  for (char const digit : kernel.substr(end)) name.wrt.push_back(digit - '0');
  return name;
}

std::string structure_of(Program const& program, OperandTypes const& types) {
  std::string bytes;
  auto const add = [&](int value) { bytes += static_cast<char>(value); };
  add(program.length);
  add(program.chain);
  add(program.operand_count);
  for (int k = 0; k < program.operand_count; ++k) {
    add(static_cast<int>(types[k].dtype));
    add(static_cast<int>(types[k].kind));
  }
  for (int index = 0; index < program.length; ++index) {
    Instruction const& instruction = program.instructions[index];
    for (int const part : {instruction.op, instruction.a, instruction.b, instruction.c, instruction.slot}) add(part);
    add((instruction.steps & kScaleShift) | (instruction.is_eager != 0 ? 1 : 0));
  }
  return bytes;
}

}  // namespace cutfuse::specialize
