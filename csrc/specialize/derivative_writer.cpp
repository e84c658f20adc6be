#include "specialize/derivative_writer.h"

#include <algorithm>
#include <utility>

#include "epilogue/ops.h"

namespace cutfuse::specialize {
namespace {

constexpr char const* kOne = "0f3F800000";
constexpr char const* kZero = "0f00000000";
constexpr char const* kMaskedLiteral = "0f80000000";
constexpr char const* kMaskedBits = "2147483648";
constexpr int kArguments = 3;

std::string tangent_name(int w, int index, std::string const& part) {
  return "%tangent" + std::to_string(w) + "_" + std::to_string(index) + part + "_";
}

std::string factor_name(int index, int argument) {
  return "%factor" + std::to_string(index) + "abc"[argument] + "_";
}

int source_of(Instruction const& instruction, int argument) {
  if (argument == 0) return instruction.a;
  return argument == 1 ? instruction.b : instruction.c;
}

}  // namespace

// What is declared is known once an element has been written.
DerivativeWriter::DerivativeWriter(Program const& program, OpSnippets const& snippets, ProgramAddress address,
                                   Inputs wrt)
    : ProgramWriter(program, snippets, Primitives::kAccurate, std::move(address)),
      wrt_(std::move(wrt)),
      tangents_(wrt_.size(), std::vector<Tangent>(program.length)) {
  longest_snippet_ = longest_op();
  write_element(0);
  for (int w = 0; w < derivative_count(); ++w) {
    keep_tangent(w, 0, kZero);
    multiply_gradient(w, 0, kZero);
  }
  std::string const text = take_text();
  element_instructions_ = static_cast<int>(std::count(text.begin(), text.end(), ';'));
}

void DerivativeWriter::declare_all(int inputs, int operands, int elements) {
  declare(inputs, operands, elements);
  for (std::string const& family : families_) declare_floats(family, elements);
  declare_needs(snippets_used_);
}

std::string DerivativeWriter::family(std::string const& name) {
  if (std::find(families_.begin(), families_.end(), name) == families_.end()) families_.push_back(name);
  return name;
}

DerivativeWriter::Tangent DerivativeWriter::tangent_of(int w, int index, int source) const {
  Tangent const one = {Tangent::Kind::kOne, {}, {}, false};
  if (is_operand(source)) return wrt_[w] == source - kOperand0 + 1 ? one : Tangent();
  if (is_slot(source)) return tangents_[w][slot_holder(source - kSlot0)];
  if (is_immediate(source)) return {};
  if (source == kInput || index == 0) return wrt_[w] == 0 ? one : Tangent();
  return tangents_[w][index - 1];
}

void DerivativeWriter::after_op(int index, int i, std::vector<std::string> const& arguments) {
  Instruction const& instruction = program().instructions[index];
  has_factor_.assign(kArguments, false);
  for (int w = 0; w < derivative_count(); ++w) {
    Tangent sum;
    for (int argument = 0; argument < kOps[instruction.op].arity; ++argument) {
      Tangent const tangent = tangent_of(w, index, source_of(instruction, argument));
      if (tangent.kind == Tangent::Kind::kMasked) continue;
      Tangent const term = contribution(w, index, argument, i, arguments, tangent);
      if (term.kind == Tangent::Kind::kMasked) continue;
      sum = sum.kind == Tangent::Kind::kMasked
                ? term
                : add_tangents(sum, term, tangent_name(w, index, "sum" + std::to_string(argument)), i);
    }
    if (multiplies_and_adds(index) && sum.kind != Tangent::Kind::kMasked) {
      sum = product(scale_of(index), sum, tangent_name(w, index, "scaled"), i);
    }
    tangents_[w][index] = sum;
  }
}

// What contribution() of derivative.h gives for a tangent that is not masked for good.
DerivativeWriter::Tangent DerivativeWriter::contribution(int w, int index, int argument, int i,
                                                         std::vector<std::string> const& arguments,
                                                         Tangent const& tangent) {
  int const op = program().instructions[index].op;
  DerivativeKind const kind = kDerivativeKinds[op][argument];
  if (kind == DerivativeKind::kNone) return {};
  Snippet const& snippet = snippets().derivative(op, argument);
  if (kind == DerivativeKind::kFactor && snippet.is_one) return tangent;
  snippets_used_.push_back(&snippet);
  longest_snippet_ = std::max(longest_snippet_, snippet.instructions);
  std::vector<std::string> given = arguments;
  given.push_back(value_of(index, i));
  std::string const name = tangent_name(w, index, std::string(1, "abc"[argument]));
  if (kind == DerivativeKind::kMasked) return masked_contribution(snippet, name, i, given, tangent);
  std::string const factor = family(factor_name(index, argument));
  if (!has_factor_[argument]) add(snippet, given, {element(factor, i)});
  has_factor_[argument] = true;
  if (tangent.kind == Tangent::Kind::kOne) return {Tangent::Kind::kPlain, factor, {}, true};
  return product(element(factor, i), tangent, name, i);
}

DerivativeWriter::Tangent DerivativeWriter::masked_contribution(Snippet const& snippet, std::string const& name, int i,
                                                                std::vector<std::string> const& arguments,
                                                                Tangent const& tangent) {
  std::vector<std::string> given = arguments;
  given.push_back(unsigned_value(tangent, i));
  std::string const result = family(name);
  add(snippet, given, {element(result, i)});
  if (tangent.kind == Tangent::Kind::kMaybeMasked) {
    select_masked(element(result, i), element(tangent.origin, i), kMaskedLiteral, element(result, i));
  }
  return {Tangent::Kind::kMaybeMasked, result, result, false};
}

DerivativeWriter::Tangent DerivativeWriter::product(std::string const& factor, Tangent const& tangent,
                                                    std::string const& name, int i) {
  std::string const result = family(name);
  if (tangent.kind == Tangent::Kind::kOne) {
    move(element(result, i), factor);
    return {Tangent::Kind::kPlain, result, {}, true};
  }
  line("mul.rn.f32 " + element(result, i) + ", " + factor + ", " + element(tangent.value, i) + ";");
  return {tangent.kind, result, tangent.origin, true};
}

DerivativeWriter::Tangent DerivativeWriter::add_tangents(Tangent const& a, Tangent const& b, std::string const& name,
                                                         int i) {
  std::string const result = family(name);
  auto const term = [&](Tangent const& tangent) {
    return tangent.kind == Tangent::Kind::kPlain ? element(tangent.value, i) : exact(tangent, i);
  };
  std::string const first = term(a);
  std::string const second = term(b);
  line("add.rn.f32 " + element(result, i) + ", " + first + ", " + second + ";");
  bool const may_be_masked = a.kind == Tangent::Kind::kMaybeMasked && b.kind == Tangent::Kind::kMaybeMasked;
  if (may_be_masked) return {Tangent::Kind::kMaybeMasked, result, result, false};
  return {Tangent::Kind::kPlain, result, {}, a.is_signed || b.is_signed};
}

// A register with the tangent's value, whose zero is +0; junk where the tangent is masked.
std::string DerivativeWriter::unsigned_value(Tangent const& tangent, int i) {
  if (tangent.kind == Tangent::Kind::kOne) return kOne;
  if (!tangent.is_signed) return element(tangent.value, i);
  std::string const result = element(family(tangent.value + "unsigned_"), i);
  line("add.rn.f32 " + result + ", " + element(tangent.value, i) + ", " + kZero + ";");
  return result;
}

// A register with the interpreter's tangent: -0 where it is masked.
std::string DerivativeWriter::exact(Tangent const& tangent, int i) {
  std::string const value = unsigned_value(tangent, i);
  bool const is_literal = tangent.kind == Tangent::Kind::kOne;
  bool const is_exact = tangent.kind != Tangent::Kind::kMaybeMasked || !tangent.is_signed;
  if (!is_literal && is_exact) return value;
  std::string const result = element(family(is_literal ? "%one_" : tangent.value + "exact_"), i);
  if (is_literal) {
    move(result, value);
  } else {
    select_masked(result, element(tangent.origin, i), kMaskedLiteral, value);
  }
  return result;
}

void DerivativeWriter::select_masked(std::string const& target, std::string const& origin, std::string const& masked,
                                     std::string const& otherwise) {
  line("{");
  line(".reg .pred is_masked;");
  line("setp.eq.b32 is_masked, " + origin + ", " + kMaskedBits + ";");
  line("selp.f32 " + target + ", " + masked + ", " + otherwise + ", is_masked;");
  line("}");
}

// input_gradient() of derivative.h.
void DerivativeWriter::multiply(Tangent const& tangent, int i, std::string const& gradient) {
  if (tangent.kind == Tangent::Kind::kMasked) {
    move(gradient, kZero);
    return;
  }
  std::string const value = unsigned_value(tangent, i);
  line("mul.rn.f32 " + gradient + ", " + gradient + ", " + value + ";");
  if (tangent.kind == Tangent::Kind::kMaybeMasked) {
    select_masked(gradient, element(tangent.origin, i), kZero, gradient);
  }
}

void DerivativeWriter::multiply_gradient(int w, int i, std::string const& gradient) {
  multiply(tangents_[w][program().length - 1], i, gradient);
}

void DerivativeWriter::keep_tangent(int w, int i, std::string const& to) {
  Tangent const& tangent = tangents_[w][program().length - 1];
  move(to, tangent.kind == Tangent::Kind::kMasked ? kMaskedLiteral : exact(tangent, i));
}

void DerivativeWriter::multiply_gradient_kept(int w, std::string const& kept, std::string const& gradient) {
  Tangent::Kind const kind = tangents_[w][program().length - 1].kind;
  line("mul.rn.f32 " + gradient + ", " + gradient + ", " + kept + ";");
  bool const may_be_masked = kind == Tangent::Kind::kMaybeMasked || kind == Tangent::Kind::kMasked;
  if (may_be_masked) select_masked(gradient, kept, kZero, gradient);
}

}  // namespace cutfuse::specialize
