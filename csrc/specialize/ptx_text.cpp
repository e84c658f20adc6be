#include "specialize/ptx_text.h"

#include <algorithm>
#include <cctype>

namespace cutfuse::specialize {
namespace {

constexpr std::string_view kFunction = "\n.func ";

}  // namespace

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

bool is_name_character(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$'; }

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

}  // namespace cutfuse::specialize
