// A program and its derivatives as straight-line PTX: values once, tangents once for each input that is differentiated
// with respect to.
//
// It gives the bits of the interpreter over dual numbers, whose every step is contribution() of derivative.h. What is
// known of a tangent when the text is written spares most of that:
//  - A tangent is masked (-0) for good where nothing propagates to it: an addition of -0 changes nothing.
//  - That of the input itself is 1.
//  - Others are masked only where a masked derivative has been. Behind it factors leave that as it is, so a tangent is
//    carried in parts: what it is if nothing is masked, whether it is, and what it is then, -0 or NaN. They are put
//    together where the tangent is added to another one, and at the end.
//  - The sign of a tangent's zero, which contribution() makes positive, means nothing to products and sums. It is made
//    positive at the same places.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "epilogue/ops.h"
#include "epilogue/primitives.h"
#include "specialize/kernel_variant.h"
#include "specialize/program_writer.h"

namespace cutfuse::specialize {

// What kind of derivative an op has with respect to an argument.
enum class DerivativeKind : uint8_t {
  kNone,    // nothing is propagated
  kFactor,  // a factor of the tangent
  kMasked,  // a factor where a mask passes the tangent
};

template <class Derivative>
constexpr DerivativeKind derivative_kind_of() {
  if (std::is_same_v<Derivative, NoDerivative>) return DerivativeKind::kNone;
  return std::is_same_v<Derivative, float> ? DerivativeKind::kFactor : DerivativeKind::kMasked;
}

// Of each op and argument, from the functors of ops.def.
inline constexpr DerivativeKind kDerivativeKinds[][3] = {
#define CUTFUSE_OP(Camel, ...)                                                                                       \
  {derivative_kind_of<decltype(ops::Camel::derivative_a<AccuratePrimitives>(0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f))>(), \
   derivative_kind_of<decltype(ops::Camel::derivative_b<AccuratePrimitives>(0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f))>(), \
   derivative_kind_of<decltype(ops::Camel::derivative_c<AccuratePrimitives>(0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f))>()},
#include "epilogue/ops.def"
};

inline constexpr char const* kOne = "0f3F800000";
inline constexpr char const* kZero = "0f00000000";
inline constexpr char const* kMaskedTangentText = "0f80000000";
inline constexpr int kArguments = 3;
inline constexpr std::string_view kArgumentNames = "abc";

inline std::string tangent_name(int w, int index, std::string const& part) {
  return "%tangent" + std::to_string(w) + "_" + std::to_string(index) + part + "_";
}

class DerivativeWriter final : public ProgramWriter {
 public:
  // The program is not empty. What is declared is known once an element has been written.
  DerivativeWriter(Program const& program, OpSnippets const& snippets, Primitives primitives, ProgramAddress address,
                   Inputs wrt)
      : ProgramWriter(program, snippets, primitives, std::move(address)),
        wrt_(std::move(wrt)),
        tangents_(wrt_.size(), std::vector<Tangent>(program.length)),
        longest_snippet_(longest_op()) {
    write_element(0);
    for (int w = 0; w < derivative_count(); ++w) {
      keep_tangent(w, 0, kZero);
      multiply_gradient(w, 0, kZero);
    }
    std::string const text = take_text();
    element_instructions_ = static_cast<int>(std::count(text.begin(), text.end(), ';'));
  }

  // Instructions of PTX that one element takes, and the longest of its snippets.
  int element_instructions() const { return element_instructions_; }
  int longest_snippet() const { return longest_snippet_; }

  // Also registers of the derivatives of so many elements.
  void declare_all(int inputs, int operands, int elements) {
    declare(inputs, operands, elements);
    for (std::string const& registers : families_) declare_floats(registers, elements);
    for (std::string const& registers : predicates_) {
      line(".reg .pred " + registers + "<" + std::to_string(elements) + ">;");
    }
    line(".reg .pred %is_kept_masked;");
    declare_needs(snippets_used_);
  }

  int derivative_count() const { return static_cast<int>(wrt_.size()); }
  // gradient *= derivative w of element i, which has been written: input_gradient() of derivative.h.
  void multiply_gradient(int w, int i, std::string const& gradient) {
    Tangent const& tangent = tangents_[w][program().length - 1];
    if (tangent.kind == Tangent::Kind::kMasked) {
      move(gradient, kZero);
      return;
    }
    std::string const value = with_positive_zero(tangent, i);
    line("mul.rn.f32 " + gradient + ", " + gradient + ", " + value + ";");
    if (tangent.kind != Tangent::Kind::kMaybeMasked) return;
    std::string zero = kZero;
    if (!tangent.zero.empty()) {
      zero = element(family(tangent.zero + "positive_"), i);
      line("abs.f32 " + zero + ", " + element(tangent.zero, i) + ";");
    }
    set_where(element(tangent.masked, i), gradient, zero, gradient);
  }

  // The same in two steps: the tangent may be moved to other registers in between.
  void keep_tangent(int w, int i, std::string const& to) {
    Tangent const& tangent = tangents_[w][program().length - 1];
    move(to, tangent.kind == Tangent::Kind::kMasked ? kMaskedTangentText : exact(tangent, i));
  }

  void multiply_gradient_kept(int w, std::string const& kept, std::string const& gradient) {
    Tangent::Kind const kind = tangents_[w][program().length - 1].kind;
    line("mul.rn.f32 " + gradient + ", " + gradient + ", " + kept + ";");
    bool const may_be_masked = kind == Tangent::Kind::kMaybeMasked || kind == Tangent::Kind::kMasked;
    if (!may_be_masked) return;
    find_masked("%is_kept_masked", kept);
    set_where("%is_kept_masked", gradient, kZero, gradient);
  }

 private:
  // Families of registers, of an element each.
  struct Tangent {
    enum class Kind { kMasked, kOne, kPlain, kMaybeMasked };
    Kind kind = Kind::kMasked;
    std::string value;       // where it is not masked
    bool is_signed = false;  // a zero of it may be -0
    std::string masked;      // of kMaybeMasked: predicates, whether it is masked
    std::string zero;        // and a zero or NaN, which it is then; empty for a zero
  };

  // An op's derivative with respect to an argument.
  struct Factor {
    std::string registers;
    bool is_one;
    std::string masked;  // predicates; empty for a derivative without a mask
  };

  void after_op(int index, int i, std::vector<std::string> const& arguments) override {
    Instruction const& instruction = program().instructions[index];
    has_factor_.assign(kArguments, false);
    for (int w = 0; w < derivative_count(); ++w) {
      Tangent sum;
      for (int argument = 0; argument < kOps[instruction.op].arity; ++argument) {
        Tangent const tangent = tangent_of(w, index, argument_source(instruction, argument));
        bool const propagates = kDerivativeKinds[instruction.op][argument] != DerivativeKind::kNone;
        if (tangent.kind == Tangent::Kind::kMasked || !propagates) continue;
        std::string const name = tangent_name(w, index, std::string(1, kArgumentNames[argument]));
        Factor const factor = factor_of(index, argument, i, arguments);
        Tangent term = multiplied(tangent, factor, name, i);
        if (!factor.masked.empty()) term = masked_by(tangent, term, factor.masked, name, i);
        bool const is_first = sum.kind == Tangent::Kind::kMasked;
        sum = is_first ? term : added(sum, term, tangent_name(w, index, "sum" + std::to_string(argument)), i);
      }
      if (multiplies_and_adds(index) && sum.kind != Tangent::Kind::kMasked) {
        std::string const scale = family("%scale" + std::to_string(index) + "_");
        move(element(scale, i), scale_of(index));
        sum = multiplied(sum, {scale, false, {}}, tangent_name(w, index, "scaled"), i);
      }
      tangents_[w][index] = sum;
    }
  }

  Tangent tangent_of(int w, int index, int source) const {
    Tangent one;
    one.kind = Tangent::Kind::kOne;
    if (is_operand(source)) return wrt_[w] == source - kOperand0 + 1 ? one : Tangent();
    if (is_slot(source)) return tangents_[w][slot_holder(source - kSlot0)];
    if (is_immediate(source)) return {};
    if (source == kInput || index == 0) return wrt_[w] == 0 ? one : Tangent();
    return tangents_[w][index - 1];
  }

  // Written once for all derivatives.
  Factor factor_of(int index, int argument, int i, std::vector<std::string> const& arguments) {
    int const op = program().instructions[index].op;
    Snippet const& snippet = snippets().derivative(op, argument, primitives());
    std::string const name = "%factor" + std::to_string(index) + kArgumentNames[argument];
    Factor factor = {name + "_", snippet.is_one, {}};
    bool const has_mask = kDerivativeKinds[op][argument] == DerivativeKind::kMasked;
    if (has_mask) factor.masked = name + "masked_";
    if (has_factor_[argument] || (factor.is_one && !has_mask)) return factor;
    has_factor_[argument] = true;
    snippets_used_.push_back(&snippet);
    longest_snippet_ = std::max(longest_snippet_, snippet.instructions);
    std::vector<std::string> results = {element(family(factor.registers), i)};
    if (has_mask) results.push_back(element(family(name + "bits_"), i));
    std::vector<std::string> given = arguments;
    given.push_back(value_of(index, i));
    add(snippet, given, results);
    if (has_mask) line("setp.ne.b32 " + element(predicates(factor.masked), i) + ", " + results[1] + ", 0;");
    return factor;
  }

  Tangent multiplied(Tangent const& tangent, Factor const& factor, std::string const& name, int i) {
    if (factor.is_one) return tangent;
    Tangent product = tangent;
    product.is_signed = true;
    if (tangent.kind == Tangent::Kind::kOne) {
      product.kind = Tangent::Kind::kPlain;
      product.value = factor.registers;
      return product;
    }
    product.value = family(name);
    line("mul.rn.f32 " + element(product.value, i) + ", " + element(factor.registers, i) + ", " +
         element(tangent.value, i) + ";");
    return product;
  }

  // A tangent behind a mask. `passed`: where the mask passes it.
  Tangent masked_by(Tangent const& before, Tangent const& passed, std::string const& masked, std::string const& name,
                    int i) {
    Tangent result = {Tangent::Kind::kMaybeMasked, passed.value, passed.is_signed, masked, {}};
    if (passed.kind == Tangent::Kind::kOne) {
      result.value = family("%one_");
      move(element(result.value, i), kOne);
    }
    if (before.kind == Tangent::Kind::kOne) return result;
    result.zero = family(name + "zero_");
    std::string const zero = element(result.zero, i);
    line("mul.rn.f32 " + zero + ", " + element(before.value, i) + ", " + kZero + ";");
    if (before.kind == Tangent::Kind::kPlain) return result;
    set_where(element(before.masked, i), zero, before.zero.empty() ? kZero : element(before.zero, i), zero);
    result.masked = predicates(name + "masked_");
    line("or.pred " + element(result.masked, i) + ", " + element(before.masked, i) + ", " + element(masked, i) + ";");
    return result;
  }

  Tangent added(Tangent const& a, Tangent const& b, std::string const& name, int i) {
    auto const term = [&](Tangent const& tangent) {
      return tangent.kind == Tangent::Kind::kPlain ? element(tangent.value, i) : exact(tangent, i);
    };
    std::string const first = term(a);
    std::string const second = term(b);
    Tangent sum;
    sum.value = family(name);
    std::string const value = element(sum.value, i);
    line("add.rn.f32 " + value + ", " + first + ", " + second + ";");
    bool const may_be_masked = a.kind == Tangent::Kind::kMaybeMasked && b.kind == Tangent::Kind::kMaybeMasked;
    if (!may_be_masked) {
      auto const has_sign = [](Tangent const& tangent) {
        return tangent.kind == Tangent::Kind::kPlain && tangent.is_signed;
      };
      sum.kind = Tangent::Kind::kPlain;
      sum.is_signed = has_sign(a) || has_sign(b);
      return sum;
    }
    sum.kind = Tangent::Kind::kMaybeMasked;
    sum.masked = predicates(name + "masked_");
    sum.zero = sum.value;
    find_masked(element(sum.masked, i), value);
    return sum;
  }

  // A register with the value of a tangent that is not masked.
  std::string with_positive_zero(Tangent const& tangent, int i) {
    if (tangent.kind == Tangent::Kind::kOne) return kOne;
    if (!tangent.is_signed) return element(tangent.value, i);
    std::string const result = element(family(tangent.value + "positive_"), i);
    line("add.rn.f32 " + result + ", " + element(tangent.value, i) + ", " + kZero + ";");
    return result;
  }

  // A register with the interpreter's tangent: -0 where it is masked.
  std::string exact(Tangent const& tangent, int i) {
    std::string value = with_positive_zero(tangent, i);
    if (tangent.kind == Tangent::Kind::kPlain) return value;
    bool const is_one = tangent.kind == Tangent::Kind::kOne;
    // Two masks may be of one value.
    std::string const name = is_one ? "%one_" : tangent.value + tangent.masked.substr(1) + "exact_";
    std::string const result = element(family(name), i);
    if (is_one) {
      move(result, kOne);
    } else if (tangent.zero.empty()) {
      set_where(element(tangent.masked, i), result, kMaskedTangentText, value);
    } else {
      line("abs.f32 " + result + ", " + element(tangent.zero, i) + ";");
      line("neg.f32 " + result + ", " + result + ";");
      set_where(element(tangent.masked, i), result, result, value);
    }
    return result;
  }

  // As bits: ptxas of CUDA 13.0 makes +0 of the -0 in a selp.f32 between -0 and 1 or -1, which it takes for a
  // conversion of the condition to a number.
  void set_where(std::string const& condition, std::string const& target, std::string const& yes,
                 std::string const& no) {
    line("selp.b32 " + target + ", " + yes + ", " + no + ", " + condition + ";");
  }

  // A predicate: whether a tangent is masked.
  void find_masked(std::string const& target, std::string const& tangent) {
    line("setp.eq.b32 " + target + ", " + tangent + ", 2147483648;");
  }

  std::string family(std::string const& name) { return add_new(families_, name); }

  std::string predicates(std::string const& name) { return add_new(predicates_, name); }

  Inputs const wrt_;
  std::vector<std::vector<Tangent>> tangents_;  // of each derivative, after each instruction
  std::vector<std::string> families_;
  std::vector<std::string> predicates_;
  std::vector<Snippet const*> snippets_used_;
  std::vector<bool> has_factor_;  // of each argument of the instruction that is written
  int element_instructions_ = 0;
  int longest_snippet_ = 0;
};

}  // namespace cutfuse::specialize
