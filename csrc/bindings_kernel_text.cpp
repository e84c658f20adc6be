// The texts that specialized kernels are put together from: of builds with kernels.
#include "bindings.h"
#include "specialize/kernel_template.h"
#include "specialize/kernel_text.h"
#include "specialize/op_snippets.h"

namespace cutfuse::bindings {
namespace {

namespace sp = cutfuse::specialize;

std::string specialize_kernel(std::string const& kernel, Program const& program, std::vector<int> const& dtypes,
                              std::string const& snippets) {
  sp::OperandTypes const types = to_operand_types(program, dtypes);
  sp::KernelText const text(kernel);
  if (snippets.empty()) return text.specialize(program, types, sp::op_snippets());
  return text.specialize(program, types, sp::OpSnippets(snippets));
}

}  // namespace

void bind_kernel_text(py::module_& module) {
  module.def("op_snippets", &sp::op_snippets_text, "The PTX that specialized epilogues are put together from.");
  module.def("kernel_template", &sp::kernel_template, py::arg("kernel"),
             "The PTX of a GEMM kernel, by its name in the table; empty for another name.");
  module.def("specialize_kernel", &specialize_kernel, py::arg("kernel"), py::arg("program"), py::arg("operand_types"),
             py::arg("snippets") = "",
             "A kernel's PTX with a program as its epilogue, given the types of the program's operands; snippets takes "
             "the place of op_snippets().");
}

}  // namespace cutfuse::bindings
