// A function of PTX put in the place of its calls, as ptxas does not by itself.
#pragma once

#include <string>
#include <string_view>

namespace cutfuse::specialize {

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
