// The functions of op_snippets.cu as text to paste into other functions of PTX.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/dtype.h"

namespace cutfuse::specialize {

// Which of primitives.h a kernel's epilogue is made of.
enum class Primitives { kFast, kAccurate };

// Text, and what comes after it where the snippet is pasted.
struct SnippetPiece {
  enum class Hole { kNone, kArgument, kResult, kNumber };

  std::string text;
  Hole hole;
  int index;  // of the argument or result
};

struct Snippet {
  std::vector<SnippetPiece> pieces;
  std::vector<std::string> locals;   // declarations of its arrays in local memory
  std::vector<std::string> globals;  // names of the tables that it reads
  int instructions;
  bool is_one;  // the first result is 1 whatever the arguments are
};

// Appends a copy of the snippet. Arguments are registers or numbers, results registers; `number` is that of the copy,
// which makes its labels unique. Registers of the copy are its own: PTX scopes them by braces.
void paste(Snippet const& snippet, std::vector<std::string> const& arguments, std::vector<std::string> const& results,
           int number, std::string& text);

// Reads the PTX that nvcc made of op_snippets.cu once. Throws std::invalid_argument where the text is not what a paste
// can be made of, in particular where ptxas would be free to contract: every addition and multiplication of floating
// point has to name its rounding.
class OpSnippets {
 public:
  explicit OpSnippets(std::string_view ptx);

  Snippet const& op(int code, Primitives primitives) const;
  // By PyTorch's own formula.
  Snippet const& eager_op(int code) const;
  // Of (a, b, c, p0, p1, value): the op's derivative with respect to an argument, and for one with a mask the bits 1
  // where it does not pass, 0 elsewhere.
  Snippet const& derivative(int code, int argument, Primitives primitives) const;
  // What op_snippets.cu calls load_<what>_<dtype>. Of (params, m, n, operand): the fragment ("operand") whose first
  // element is (m, n), and its group of columns ("group") whose first is n. Of (params, operand): its one element
  // ("scalar"). Of (params, m, operand): those of the fragment's rows ("column"). Of (params, n, operand): those of its
  // columns ("row").
  Snippet const& load(std::string const& what, DType dtype) const {
    return named("load_" + what + "_" + name_of(dtype));
  }
  // The last three where the kernel has them in shared memory, in fp32.
  Snippet const& load_staged(std::string const& what) const { return named("load_staged_" + what); }
  // Of (address, stride in elements): so many elements as they lie in memory, in words. Of words: the elements in fp32.
  // A piece has 4 or 8 elements.
  Snippet const& load_words(DType dtype, int elements) const {
    return named("load_words_" + std::to_string(8 * size_of(dtype)) + "_" + std::to_string(elements));
  }
  Snippet const& unpack(DType dtype, int elements) const {
    return named(std::string("unpack_") + name_of(dtype) + "_" + std::to_string(elements));
  }

  // How a table is declared.
  std::string const& declaration_of(std::string const& global) const { return globals_.at(global); }

 private:
  Snippet const& named(std::string const& function) const;
  void add_function(std::string_view text);

  std::unordered_map<std::string, Snippet> snippets_;
  std::unordered_map<std::string, std::string> globals_;
};

// The PTX of op_snippets.cu, and what is read from it. In builds with kernels only.
std::string_view op_snippets_text();
OpSnippets const& op_snippets();

}  // namespace cutfuse::specialize
