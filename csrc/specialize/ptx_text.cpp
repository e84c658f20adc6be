#include "specialize/ptx_text.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace cutfuse::specialize {

namespace {

constexpr std::string_view kFunction = "\n.func ";

constexpr std::string_view kCall = "call.uni";
constexpr std::string_view kCallForResult = "call.uni (retval0),";
constexpr std::string_view kLoad = "ld.param";
constexpr std::string_view kStore = "st.param";
constexpr std::string_view kReturn = "ret;";
constexpr std::string_view kParameter = "param";
constexpr std::string_view kResult = "retval0";
constexpr int kWordBytes = 4;

bool is_name_character(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$'; }

[[noreturn]] void refuse_call(std::string_view line) {
  refuse("has '" + std::string(line) + "' around a call that is to be inlined");
}

// A word of a parameter: its name and the byte at which the word starts.
using Word = std::pair<std::string, int>;

// "ld.param.f32 %f1, [retval0+4];" and "st.param.v2.f32 [param3+0], {%f1, %f2};": registers and the first word.
struct Access {
  Word word;
  std::vector<std::string> registers;
};

Access access_of(std::string_view line) {
  size_t const open = line.find('[');
  size_t const close = line.find(']', open);
  if (close == std::string_view::npos) refuse_call(line);
  std::string_view const address = line.substr(open + 1, close - open - 1);
  size_t const plus = address.find('+');
  int const offset = plus == std::string_view::npos ? 0 : number_at(address.substr(plus + 1));
  bool const is_load = starts_with(line, kLoad);
  std::string_view const between = line.substr(0, open);
  return {{std::string(address.substr(0, plus)), offset},
          names_in(is_load ? between.substr(opcode_of(line).size()) : line.substr(close + 1))};
}

// A call as its block of nvcc's has it: the register that gives each word of a parameter, the one that takes each word
// of the result, and instructions that compute the former.
struct Call {
  std::map<Word, std::string> given;
  std::map<int, std::string> taken;
  std::string before;
};

bool is_wide(std::string_view line) { return opcode_of(line).find("64") != std::string_view::npos; }

bool belongs_to_call(std::string_view line, std::string_view name) {
  static constexpr std::string_view kOthers[] = {"{",       "}",     "(",  ")",  ");", ".reg .b32 temp_param_reg;",
                                                 ".param ", "param", "//", kCall};
  if (line.empty() || starts_with(line, name)) return true;
  for (std::string_view const other : kOthers) {
    if (starts_with(line, other)) return true;
  }
  return false;
}

Call read_call(std::string_view block, std::string_view name) {
  Call call;
  bool has_called = false;
  for (std::string_view const raw : lines_of(block)) {
    std::string_view const line = trimmed(raw);
    bool const is_load = starts_with(line, kLoad);
    has_called = has_called || starts_with(line, kCall);
    if (!is_load && !starts_with(line, kStore)) {
      if (belongs_to_call(line, name)) continue;
      if (has_called || instruction_of(line).empty()) refuse_call(line);
      call.before.append(raw).append("\n");
      continue;
    }
    Access const access = access_of(line);
    auto [parameter, offset] = access.word;
    // What is loaded is the result, and what is stored before the call a parameter of it.
    bool const is_of_call =
        is_load ? has_called && parameter == kResult : !has_called && starts_with(parameter, kParameter);
    if (!is_of_call || (is_load && is_wide(line))) refuse_call(line);
    for (std::string const& own : access.registers) {
      if (is_load) {
        call.taken[offset] = own;
      } else {
        call.given[{parameter, offset}] = own;
      }
      offset += kWordBytes;
    }
  }
  return call;
}

std::string move(std::string_view type, std::string const& to, std::string const& from) {
  return "\tmov." + std::string(type) + " " + to + ", " + from + ";\n";
}

// The body as it stands in the place of a call.
std::string body_at(Call const& call, FunctionText const& function) {
  std::string const prefix = std::string(function.name) + "_param_";
  std::string text = call.before + "{\n";
  for (std::string_view const raw : lines_of(function.body)) {
    std::string_view const line = trimmed(raw);
    if (line == kReturn) continue;
    bool const is_load = starts_with(line, kLoad);
    if (!is_load && !starts_with(line, kStore)) {
      text.append(raw).append("\n");
      continue;
    }
    Access const access = access_of(line);
    auto const& [parameter, offset] = access.word;
    if (access.registers.size() != 1) refuse_call(line);
    if (!is_load) {
      auto const taken = call.taken.find(offset);
      if (parameter != function.result) refuse_call(line);
      if (taken != call.taken.end()) text += move("b32", taken->second, access.registers[0]);
      continue;
    }
    bool const is_own = starts_with(parameter, prefix);
    auto const given =
        call.given.find({is_own ? std::string(kParameter) + parameter.substr(prefix.size()) : parameter, offset});
    if (!is_own || given == call.given.end()) refuse_call(line);
    text += move(is_wide(line) ? "b64" : "b32", access.registers[0], given->second);
  }
  return text + "}";
}

// Where the next call's block starts, from `from` on, and where it ends; npos where there is none.
std::pair<size_t, size_t> find_call(std::string_view text, std::string_view name, size_t from) {
  for (size_t at = find_name(text, name, from); at != std::string_view::npos; at = find_name(text, name, at + 1)) {
    size_t const before = text.find_last_not_of(" \t\n", at - 1);
    std::string_view const head = text.substr(0, before == std::string_view::npos ? 0 : before + 1);
    if (!ends_with(head, kCall) && !ends_with(head, kCallForResult)) continue;
    size_t const open = text.rfind('{', text.rfind(".param .b64 param0;", at));
    size_t const close = open == std::string_view::npos ? open : find_closing(text, open);
    if (close == std::string_view::npos) refuse_call(name);
    return {open, close};
  }
  return {std::string_view::npos, std::string_view::npos};
}

}  // namespace

void refuse(std::string const& why) { throw std::invalid_argument("the kernel's PTX " + why); }

std::string_view trimmed(std::string_view text) {
  size_t const first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

bool starts_with(std::string_view text, std::string_view prefix) { return text.substr(0, prefix.size()) == prefix; }

bool ends_with(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    size_t const end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

size_t name_length(std::string_view text) {
  size_t length = 0;
  while (length < text.size() && is_name_character(text[length])) ++length;
  return length;
}

size_t find_name(std::string_view text, std::string_view name, size_t from) {
  for (size_t at = text.find(name, from); at != std::string_view::npos; at = text.find(name, at + 1)) {
    bool const begins = at == 0 || !is_name_character(text[at - 1]);
    if (begins && name_length(text.substr(at)) == name.size()) return at;
  }
  return std::string_view::npos;
}

std::string replace_all(std::string_view text, std::string_view what, std::string_view with) {
  std::string replaced;
  for (size_t at = text.find(what); at != std::string_view::npos; at = text.find(what)) {
    replaced += text.substr(0, at);
    replaced += with;
    text.remove_prefix(at + what.size());
  }
  return replaced += text;
}

std::vector<std::string> names_in(std::string_view text) {
  std::vector<std::string> names;
  while (!text.empty()) {
    size_t const length = text.find_first_of(" \t,{};");
    if (length > 0) names.emplace_back(text.substr(0, length));
    text.remove_prefix(length == std::string_view::npos ? text.size() : length + 1);
  }
  return names;
}

int number_at(std::string_view text) {
  int value = 0;
  for (size_t i = 0; i < text.size() && std::isdigit(static_cast<unsigned char>(text[i])) != 0; ++i) {
    value = value * 10 + (text[i] - '0');
  }
  return value;
}

size_t find_closing(std::string_view text, size_t open) {
  int depth = 0;
  for (size_t at = open; at < text.size(); ++at) {
    if (text[at] == '{') ++depth;
    if (text[at] == '}' && --depth == 0) return at;
  }
  return std::string_view::npos;
}

FunctionPlace find_function(std::string_view ptx, std::string_view part) {
  constexpr size_t kNone = std::string_view::npos;
  FunctionPlace place = {kNone, kNone, kNone, false};
  for (size_t at = ptx.find(kFunction); at != kNone; at = ptx.find(kFunction, at + 1)) {
    size_t const end = ptx.find_first_of("{;", at);
    if (ptx.substr(at, end - at).find(part) == kNone) continue;
    place.is_declared = true;
    if (end == kNone || ptx[end] != '{') continue;
    return {at, end, find_closing(ptx, end), true};
  }
  return place;
}

std::string function_name(std::string_view head) {
  head.remove_prefix(std::min(head.size(), kFunction.size()));
  std::string_view text = trimmed(head);
  if (starts_with(text, "(")) text = trimmed(text.substr(std::min(text.size(), text.find(')') + 1)));
  return std::string(text.substr(0, name_length(text)));
}

std::string without_declarations(std::string_view text, std::string_view name) {
  std::string rest;
  for (size_t at = text.find(kFunction); at != std::string_view::npos; at = text.find(kFunction)) {
    size_t const end = text.find_first_of("{;", at);
    bool const is_declaration = end != std::string_view::npos && text[end] == ';' &&
                                find_name(text.substr(at, end - at), name) != std::string_view::npos;
    size_t const next = is_declaration ? end : at;
    rest += text.substr(0, at);
    if (!is_declaration) rest += text.substr(at, 1);
    text.remove_prefix(next + 1);
  }
  return rest += text;
}

std::string_view instruction_of(std::string_view line) {
  std::string_view text = trimmed(line);
  if (starts_with(text, "@")) {
    size_t const space = text.find_first_of(" \t");
    text = space == std::string_view::npos ? std::string_view() : trimmed(text.substr(space));
  }
  bool const is_instruction = !text.empty() && std::islower(static_cast<unsigned char>(text[0])) != 0;
  return is_instruction ? text : std::string_view();
}

std::string_view opcode_of(std::string_view instruction) {
  return instruction.substr(0, instruction.find_first_of(" \t;"));
}

int count_calls(std::string_view text, std::string_view name) {
  int count = 0;
  for (size_t from = 0;; ++count) {
    auto const [open, close] = find_call(text, name, from);
    if (open == std::string_view::npos) return count;
    from = close;
  }
}

bool is_straight(std::string_view body) {
  if (body.find(kKeptLoop) != std::string_view::npos) return false;
  size_t const first = body.find(kReturn);
  return first != std::string_view::npos &&
         trimmed(body.substr(first + kReturn.size())).find_first_not_of('\n') == std::string_view::npos;
}

std::string with_inlined_calls(std::string_view text, FunctionText const& function) {
  std::string inlined;
  size_t from = 0;
  for (auto [open, close] = find_call(text, function.name, 0); open != std::string_view::npos;
       std::tie(open, close) = find_call(text, function.name, from)) {
    Call const call = read_call(text.substr(open, close + 1 - open), function.name);
    inlined += text.substr(from, open - from);
    inlined += body_at(call, function);
    from = close + 1;
  }
  return inlined += text.substr(from);
}

}  // namespace cutfuse::specialize
