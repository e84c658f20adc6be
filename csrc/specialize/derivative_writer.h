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

#include <string>
#include <vector>

#include "specialize/derivative_kinds.h"
#include "specialize/kernel_name.h"
#include "specialize/program_writer.h"

namespace cutfuse::specialize {

class DerivativeWriter final : public ProgramWriter {
 public:
  // The program is not empty.
  DerivativeWriter(Program const& program, OpSnippets const& snippets, Primitives primitives, ProgramAddress address,
                   Inputs wrt);

  // Instructions of PTX that one element takes, and the longest of its snippets.
  int element_instructions() const { return element_instructions_; }
  int longest_snippet() const { return longest_snippet_; }

  // Also registers of the derivatives of so many elements.
  void declare_all(int inputs, int operands, int elements);

  int derivative_count() const { return static_cast<int>(wrt_.size()); }
  // gradient *= derivative w of element i, which has been written.
  void multiply_gradient(int w, int i, std::string const& gradient);
  // The same in two steps: the tangent may be moved to other registers in between.
  void keep_tangent(int w, int i, std::string const& to);
  void multiply_gradient_kept(int w, std::string const& kept, std::string const& gradient);

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

  void after_op(int index, int i, std::vector<std::string> const& arguments) override;
  Tangent tangent_of(int w, int index, int source) const;
  Factor factor_of(int index, int argument, int i, std::vector<std::string> const& arguments);
  Tangent multiplied(Tangent const& tangent, Factor const& factor, std::string const& name, int i);
  Tangent masked_by(Tangent const& before, Tangent const& passed, std::string const& masked, std::string const& name,
                    int i);
  Tangent added(Tangent const& a, Tangent const& b, std::string const& name, int i);
  std::string with_positive_zero(Tangent const& tangent, int i);
  std::string exact(Tangent const& tangent, int i);
  void set_where(std::string const& condition, std::string const& target, std::string const& yes,
                 std::string const& no);
  // A predicate: whether a tangent is masked.
  void find_masked(std::string const& target, std::string const& tangent);
  std::string family(std::string const& name);
  std::string predicates(std::string const& name);

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
