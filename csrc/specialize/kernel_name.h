// What specialized kernels are called, where that is more than the name of their template.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cutfuse::specialize {

// The inputs that a program is differentiated with respect to, ascending: 0 for x, k for operand k - 1. Empty where its
// value is asked for.
using Inputs = std::vector<int>;

struct KernelName {
  std::string_view kernel_template;
  Inputs wrt;
  bool stores_pre_activation;  // of a GEMM: whether it may be asked to
};

// "pointwise_backward_bfloat16_d02" is the kernel of that template with the derivatives of inputs 0 and 2.
std::string derivative_kernel(std::string_view kernel_template, Inputs const& wrt);
// "sm90_bf16_128x128x64_2x1_pingpong_z" is the kernel of that template that stores the pre-activation z.
std::string storing_kernel(std::string_view kernel_template, bool stores_pre_activation);
KernelName read_kernel_name(std::string_view kernel);

}  // namespace cutfuse::specialize
