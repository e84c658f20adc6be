// The share of cutfuse._C that specialized epilogues have.
#include "bindings.h"
#include "specialize/kernel_text.h"
#include "specialize/op_snippets.h"

namespace cutfuse::bindings {
namespace {

namespace sp = cutfuse::specialize;

sp::OperandTypes to_operand_types(Program const& program, std::vector<int> const& dtypes) {
  check_operand_count(program, dtypes.size());
  sp::OperandTypes types = {};
  for (size_t k = 0; k < dtypes.size(); ++k) types[k] = to_dtype(dtypes[k]);
  return types;
}

std::string specialize_kernel(std::string const& kernel, Program const& program, std::vector<int> const& dtypes,
                              std::string const& snippets) {
  sp::OperandTypes const types = to_operand_types(program, dtypes);
  sp::KernelText const text(kernel);
  if (snippets.empty()) return text.specialize(program, types, sp::op_snippets());
  return text.specialize(program, types, sp::OpSnippets(snippets));
}

}  // namespace

void bind_specialize(py::module_& module) {
  module.def("op_snippets", &sp::op_snippets_text, "The PTX that specialized epilogues are put together from.");
  module.def("specialize_kernel", &specialize_kernel, py::arg("kernel"), py::arg("program"), py::arg("operand_types"),
             py::arg("snippets") = "",
             "A kernel's PTX with a program as its epilogue, given the types of the program's operands; snippets takes "
             "the place of op_snippets().");
}

}  // namespace cutfuse::bindings
