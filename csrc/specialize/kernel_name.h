// What specialized kernels are called, where that is more than the name of their template.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "specialize/gemm_text.h"

namespace cutfuse::specialize {

// The inputs that a program is differentiated with respect to, ascending: 0 for x, k for operand k - 1. Empty where its
// value is asked for.
using Inputs = std::vector<int>;

struct KernelName {
  std::string_view kernel_template;
  Inputs wrt;
  GemmVariant variant;
};

// "pointwise_backward_bfloat16_d02" is the kernel of that template with the derivatives of inputs 0 and 2.
std::string derivative_kernel(std::string_view kernel_template, Inputs const& wrt);
// "sm90_bf16_128x128x64_2x1_pingpong_z" is the kernel of that template that stores the pre-activation z, and
// "sm90_bf16_rows_64x128x64_1x1_pingpong_sum" the one that computes sums and means.
std::string variant_kernel(std::string_view kernel_template, GemmVariant const& variant);
KernelName read_kernel_name(std::string_view kernel);

}  // namespace cutfuse::specialize
