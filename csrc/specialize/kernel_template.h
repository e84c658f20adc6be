// The PTX of the kernels that programs are compiled into.
#pragma once

#include <string_view>

namespace cutfuse::specialize {

// The PTX of a kernel as KernelText takes it: of a GEMM kernel by the name of its row in plan/gemm_configs.def, of one
// in *_templates.cu by its own. Empty for another name. In builds with kernels only: written by
// cmake/embed_kernel_templates.py.
std::string_view kernel_template(std::string_view kernel);

}  // namespace cutfuse::specialize
