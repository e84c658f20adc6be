// The PTX of the kernels that programs are compiled into.
#pragma once

#include <string_view>

namespace cutfuse::specialize {

// The PTX of a GEMM kernel by the name of its row in plan/gemm_configs.def, as KernelText takes it; empty for another
// name. In builds with kernels only: written by cmake/embed_kernel_templates.py.
std::string_view kernel_template(std::string_view kernel);

}  // namespace cutfuse::specialize
