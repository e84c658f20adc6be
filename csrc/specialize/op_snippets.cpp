#include "specialize/op_snippets.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

#include "epilogue/ops.h"
#include "specialize/ptx_text.h"

namespace cutfuse::specialize {
namespace {

constexpr std::string_view kFunctionStart = ".visible .func";

// In the names of op_snippets.cu.
std::string infix_of(Primitives primitives) { return primitives == Primitives::kFast ? "_fast_" : "_accurate_"; }

[[noreturn]] void refuse_in(std::string const& function, std::string_view line, char const* why) {
  throw std::invalid_argument("op_snippets.cu: " + function + ": '" + std::string(trimmed(line)) + "' " + why);
}

// Whether ptxas may contract it with what is next to it: "mul.f32", but neither "mul.rn.f32" nor "mul.lo.s32".
bool leaves_rounding_open(std::string_view opcode) {
  if (opcode_of(opcode).find(".f") == std::string_view::npos) return false;
  for (std::string_view const operation : {"add.", "sub.", "mul."}) {
    if (!starts_with(opcode, operation)) continue;
    opcode.remove_prefix(operation.size());
    return !starts_with(opcode, "rn") && !starts_with(opcode, "rz") && !starts_with(opcode, "rm") &&
           !starts_with(opcode, "rp");
  }
  return false;
}

// Whether the first result is stored from a register that is set once, to 1.
bool gives_one(std::string_view body) {
  constexpr std::string_view kStore = "st.param.f32 \t[func_retval0+0], ";
  size_t const store = body.find(kStore);
  if (store == std::string_view::npos) return false;
  std::string_view const stored = body.substr(store + kStore.size());
  std::string const target = "\t" + std::string(stored.substr(0, stored.find(';'))) + ", ";
  size_t const set = body.find(target);
  return set != std::string_view::npos && starts_with(body.substr(set + target.size()), "0f3F800000;") &&
         body.find(target, set + 1) == std::string_view::npos;
}

// Makes a snippet of a function's body, line by line.
class SnippetReader {
 public:
  explicit SnippetReader(std::string function) : function_(std::move(function)) {}

  void read(std::string_view line) {
    std::string_view const text = trimmed(line);
    if (text.empty() || starts_with(text, "//")) return;
    if (starts_with(text, ".local")) {
      snippet_.locals.emplace_back(text);
      return;
    }
    std::string_view const instruction = instruction_of(text);
    if (leaves_rounding_open(instruction)) refuse_in(function_, text, "names no rounding: compile with -fmad=false");
    if (returns_) leave();
    snippet_.instructions += instruction.empty() ? 0 : 1;
    if (starts_with(instruction, "call")) refuse_in(function_, text, "calls a function, which is not pasted");
    if (starts_with(instruction, "ld.param.")) {
      read_argument(text);
    } else if (starts_with(instruction, "st.param.")) {
      read_result(text);
    } else if (starts_with(instruction, "ret;")) {
      returns_ = true;
    } else {
      add_with_labels(text);
      add("\n");
    }
  }

  Snippet finish() {
    if (!returns_ && !leaves_) refuse_in(function_, "", "does not return");
    if (leaves_) {
      add("$Lpasted_", SnippetPiece::Hole::kNumber);
      add(":\n");
    }
    return std::move(snippet_);
  }

 private:
  void add(std::string_view text, SnippetPiece::Hole hole = SnippetPiece::Hole::kNone, int index = 0) {
    bool const continues = !snippet_.pieces.empty() && snippet_.pieces.back().hole == SnippetPiece::Hole::kNone;
    if (continues) {
      snippet_.pieces.back().text += text;
      snippet_.pieces.back().hole = hole;
      snippet_.pieces.back().index = index;
    } else {
      snippet_.pieces.push_back({std::string(text), hole, index});
    }
  }

  // A return with more code behind it.
  void leave() {
    add("bra.uni \t$Lpasted_", SnippetPiece::Hole::kNumber);
    add(";\n");
    returns_ = false;
    leaves_ = true;
  }

  // "ld.param.f32 %f1, [op_fast_add_param_0];" is a move from the argument, whose register may be of another type.
  void read_argument(std::string_view text) {
    std::string const parameter = "[" + function_ + "_param_";
    size_t const type = text.find_last_of('.', text.find_first_of(" \t"));
    size_t const comma = text.find(',');
    size_t const index = text.find(parameter);
    if (index == std::string_view::npos || text.find('{') != std::string_view::npos) {
      refuse_in(function_, text, "reads something else than a parameter");
    }
    bool const is_wide = text.substr(type + 2, 2) == "64";
    add(is_wide ? "mov.b64" : "mov.b32");
    add(text.substr(type + 4, comma - type - 4));
    add(", ", SnippetPiece::Hole::kArgument, number_at(text.substr(index + parameter.size())));
    add(";\n");
  }

  // "st.param.v4.f32 [func_retval0+16], {%f1, %f2, %f3, %f4};" are moves to results 4 to 7.
  void read_result(std::string_view text) {
    constexpr std::string_view kResult = "[func_retval0";
    size_t const address = text.find(kResult);
    size_t const close = text.find(']');
    size_t const type = text.find_last_of('.', text.find_first_of(" \t"));
    bool const is_float = starts_with(text.substr(type), ".f32");
    if (address == std::string_view::npos || close == std::string_view::npos || !is_float) {
      refuse_in(function_, text, "writes something else than a result in fp32");
    }
    size_t const offset = address + kResult.size() + 1;
    int index = number_at(text.substr(std::min(offset, close))) / static_cast<int>(sizeof(float));
    std::string_view values = text.substr(text.find(',', close) + 1);
    for (std::string const& value : names_in(values.substr(0, values.find(';')))) {
      add("mov.f32 \t", SnippetPiece::Hole::kResult, index++);
      add(", " + value + ";\n");
    }
  }

  // A label of the function, wherever it stands, gets the number of the copy.
  void add_with_labels(std::string_view text) {
    for (size_t at = text.find('$'); at != std::string_view::npos; at = text.find('$')) {
      size_t const length = name_length(text.substr(at));
      add(std::string(text.substr(0, at + length)) + "_", SnippetPiece::Hole::kNumber);
      text.remove_prefix(at + length);
    }
    add(text);
  }

  std::string function_;
  Snippet snippet_{{}, {}, {}, 0, false};
  bool returns_ = false;  // the last line did
  bool leaves_ = false;   // an earlier line did
};

}  // namespace

void paste(Snippet const& snippet, std::vector<std::string> const& arguments, std::vector<std::string> const& results,
           int number, std::string& text) {
  text += "{\n";
  for (SnippetPiece const& piece : snippet.pieces) {
    text += piece.text;
    switch (piece.hole) {
      case SnippetPiece::Hole::kNone:
        break;
      case SnippetPiece::Hole::kArgument:
        text += arguments.at(piece.index);
        break;
      case SnippetPiece::Hole::kResult:
        text += results.at(piece.index);
        break;
      case SnippetPiece::Hole::kNumber:
        text += std::to_string(number);
        break;
    }
  }
  text += "}\n";
}

OpSnippets::OpSnippets(std::string_view ptx) {
  for (std::string_view const line : lines_of(ptx)) {
    if (!starts_with(line, ".global")) continue;
    std::string_view const declared = line.substr(0, line.find('['));
    size_t const name = declared.find_last_of(" \t") + 1;
    globals_.emplace(declared.substr(name), line);
  }
  for (size_t at = ptx.find(kFunctionStart); at != std::string_view::npos; at = ptx.find(kFunctionStart, at + 1)) {
    add_function(ptx.substr(at));
  }
  for (int code = 0; code < kOpCount; ++code) {
    eager_op(code);
    for (Primitives const primitives : {Primitives::kFast, Primitives::kAccurate}) {
      op(code, primitives);
      for (int argument = 0; argument < kOps[code].arity; ++argument) derivative(code, argument, primitives);
    }
  }
  for (DType const dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (char const* const what : {"operand", "group", "scalar", "column", "row"}) load(what, dtype);
    for (int const elements : {4, 8}) {
      load_words(dtype, elements);
      if (dtype != DType::kFloat32) unpack(dtype, elements);
    }
  }
}

void OpSnippets::add_function(std::string_view text) {
  size_t const result = text.find(") ");
  size_t const open = text.find('{');
  size_t const close = open == std::string_view::npos ? open : find_closing(text, open);
  if (result == std::string_view::npos || close == std::string_view::npos) {
    throw std::invalid_argument("op_snippets.cu: a function without a result or a body");
  }
  std::string const function(text.substr(result + 2, name_length(text.substr(result + 2))));
  std::string_view const body = text.substr(open + 1, close - open - 1);
  SnippetReader reader(function);
  for (std::string_view const line : lines_of(body)) reader.read(line);
  Snippet snippet = reader.finish();
  snippet.is_one = gives_one(body);
  for (auto const& [global, declaration] : globals_) {
    if (find_name(body, global) != std::string_view::npos) snippet.globals.push_back(global);
  }
  snippets_.emplace(function, std::move(snippet));
}

Snippet const& OpSnippets::named(std::string const& function) const {
  auto const found = snippets_.find(function);
  if (found == snippets_.end()) throw std::invalid_argument("op_snippets.cu: there is no function " + function);
  return found->second;
}

Snippet const& OpSnippets::op(int code, Primitives primitives) const {
  return named("op" + infix_of(primitives) + kOps[code].name);
}

Snippet const& OpSnippets::eager_op(int code) const { return named(std::string("op_eager_") + kOps[code].name); }

Snippet const& OpSnippets::derivative(int code, int argument, Primitives primitives) const {
  constexpr std::string_view kArguments = "abc";
  return named("derivative" + infix_of(primitives) + kArguments[argument] + "_" + kOps[code].name);
}

}  // namespace cutfuse::specialize
