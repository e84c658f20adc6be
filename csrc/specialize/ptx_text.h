// Looking through PTX as nvcc writes it, one instruction or declaration a line, and putting a function in the place of
// its calls, as ptxas does not by itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cutfuse::specialize {

// Before a loop that ptxas is to keep, and how a loop is known again.
constexpr std::string_view kKeptLoop = ".pragma \"nounroll\";";

// Throws std::invalid_argument, of what a kernel's text is or has.
[[noreturn]] void refuse(std::string const& why);

// Without spaces and tabs at both ends.
std::string_view trimmed(std::string_view text);

bool starts_with(std::string_view text, std::string_view prefix);
bool ends_with(std::string_view text, std::string_view suffix);

// The lines, without their ends.
std::vector<std::string_view> lines_of(std::string_view text);

// The length of the identifier at the start.
size_t name_length(std::string_view text);

// Where `name` stands as a whole identifier, from `from` on; npos where it does not.
size_t find_name(std::string_view text, std::string_view name, size_t from = 0);

// The text with `with` wherever it has `what`, also as the first part of a longer name.
std::string replace_all(std::string_view text, std::string_view what, std::string_view with);

// The registers, names and numbers of a list, whatever braces and commas stand between them.
std::vector<std::string> names_in(std::string_view text);

// The number at the start; 0 where there is no digit.
int number_at(std::string_view text);

// Where the brace that closes the one at `open` stands; npos where it is missing.
size_t find_closing(std::string_view text, size_t open);

// A function that is defined: where its ".func" starts a line, and its braces; start is npos where there is none, and
// is_declared says whether there is a declaration.
struct FunctionPlace {
  size_t start;
  size_t open;
  size_t close;
  bool is_declared;
};

// The function of which the name has `part`.
FunctionPlace find_function(std::string_view ptx, std::string_view part);

// The name, given a text from ".func" to its parameters.
std::string function_name(std::string_view head);

// The text without the declarations of a function.
std::string without_declarations(std::string_view text, std::string_view name);

// The first instruction on a line behind its predicate; empty for labels, directives and braces.
std::string_view instruction_of(std::string_view line);

// The opcode of an instruction, such as "mul.rn.f32".
std::string_view opcode_of(std::string_view instruction);

// A function whose parameters are <name>_param_0 and so on. body: what stands between its braces; result: the parameter
// that takes its result, empty where it has none.
struct FunctionText {
  std::string_view name;
  std::string_view result;
  std::string_view body;
};

// How many calls of a function a text has.
int count_calls(std::string_view text, std::string_view name);

// Whether a body can stand in the place of a call: it has no loop, and returns once, at its end.
bool is_straight(std::string_view body);

// The text with a straight function's body at each of its calls, in braces of its own: the registers that a call gives
// and takes are moved to the body's and from them. Throws std::invalid_argument where a call is not as nvcc writes it.
std::string with_inlined_calls(std::string_view text, FunctionText const& function);

}  // namespace cutfuse::specialize
