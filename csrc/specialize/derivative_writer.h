// A program and its derivatives as straight-line PTX: values once, tangents once for each input that is differentiated
// with respect to.
//
// It gives the bits of the interpreter over dual numbers, whose every step is contribution() of derivative.h. What is
// known of a tangent when the text is written spares most of that:
//  - A tangent is masked (-0) for good where nothing propagates to it: an addition of -0 changes nothing.
//  - That of the input itself is 1.
//  - Others are masked only where a masked derivative has been. Behind it factors leave that as it is, so whether it is
//    masked is asked of the tangent that the mask made, and once: where the tangent is added to another one, where the
//    next mask takes it, or at the end.
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
  DerivativeWriter(Program const& program, OpSnippets const& snippets, ProgramAddress address, Inputs wrt);

  // Instructions of PTX that one element takes, and the longest of its snippets.
  int element_instructions() const { return element_instructions_; }
  int longest_snippet() const { return longest_snippet_; }

  // Also registers of the derivatives of so many elements.
  void declare_all(int inputs, int operands, int elements);

  int derivative_count() const { return static_cast<int>(wrt_.size()); }
  // After write_element(i): moves what multiply_gradient takes of derivative w to another register.
  void keep_tangent(int w, int i, std::string const& to);
  // gradient *= derivative w, whose tangent is that of element i, or has been kept.
  void multiply_gradient(int w, int i, std::string const& gradient);
  void multiply_gradient_kept(int w, std::string const& kept, std::string const& gradient);

 private:
  struct Tangent {
    enum class Kind { kMasked, kOne, kPlain, kMaybeMasked };
    Kind kind = Kind::kMasked;
    std::string value;       // a family of registers, as all that follow
    std::string origin;      // masked where this one is
    bool is_signed = false;  // a zero may be -0
  };

  void after_op(int index, int i, std::vector<std::string> const& arguments) override;
  Tangent tangent_of(int w, int index, int source) const;
  Tangent contribution(int w, int index, int argument, int i, std::vector<std::string> const& arguments,
                       Tangent const& tangent);
  Tangent masked_contribution(Snippet const& snippet, std::string const& name, int i,
                              std::vector<std::string> const& arguments, Tangent const& tangent);
  Tangent add_tangents(Tangent const& a, Tangent const& b, std::string const& name, int i);
  Tangent product(std::string const& factor, Tangent const& tangent, std::string const& name, int i);
  std::string exact(Tangent const& tangent, int i);
  std::string unsigned_value(Tangent const& tangent, int i);
  void select_masked(std::string const& target, std::string const& origin, std::string const& masked,
                     std::string const& otherwise);
  void multiply(Tangent const& tangent, int i, std::string const& gradient);
  std::string family(std::string const& name);

  Inputs const wrt_;
  std::vector<std::vector<Tangent>> tangents_;  // of each derivative, after each instruction
  std::vector<std::string> families_;
  std::vector<Snippet const*> snippets_used_;
  std::vector<bool> has_factor_;  // of each instruction's arguments, for the element that is written
  int element_instructions_ = 0;
  int longest_snippet_ = 0;
};

}  // namespace cutfuse::specialize
