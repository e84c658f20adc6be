#include "specialize/kernel_name.h"

#include <algorithm>

namespace cutfuse::specialize {
namespace {

constexpr std::string_view kSuffix = "_d";
constexpr std::string_view kStoresSuffix = "_z";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

std::string derivative_kernel(std::string_view kernel_template, Inputs const& wrt) {
  std::string name(kernel_template);
  if (!wrt.empty()) name += kSuffix;
  for (int const input : wrt) name += static_cast<char>('0' + input);
  return name;
}

std::string storing_kernel(std::string_view kernel_template, bool stores_pre_activation) {
  return std::string(kernel_template) + std::string(stores_pre_activation ? kStoresSuffix : "");
}

KernelName read_kernel_name(std::string_view kernel) {
  size_t const stem = kernel.size() - std::min(kernel.size(), kStoresSuffix.size());
  if (kernel.substr(stem) == kStoresSuffix) return {kernel.substr(0, stem), {}, true};
  size_t end = kernel.size();
  while (end > 0 && is_digit(kernel[end - 1])) --end;
  bool const has_suffix =
      end < kernel.size() && end > kSuffix.size() && kernel.substr(end - kSuffix.size(), kSuffix.size()) == kSuffix;
  if (!has_suffix) return {kernel, {}, false};
  KernelName name = {kernel.substr(0, end - kSuffix.size()), {}, false};
  for (char const digit : kernel.substr(end)) name.wrt.push_back(digit - '0');
  return name;
}

}  // namespace cutfuse::specialize
