// The texts that specialized kernels are put together from, and what such kernels are given: of builds with kernels.
#include "bindings.h"
#include "pointwise/kernels.h"
#include "reduce/kernels.h"
#include "specialize/kernel_text.h"
#include "specialize/op_snippets.h"

namespace cutfuse::bindings {

namespace {

namespace sp = cutfuse::specialize;

std::string specialize_kernel(std::string const& kernel, Program const& program, std::vector<DType> const& dtypes,
                              std::string const& snippets, std::vector<sp::OperandKind> const& kinds,
                              sp::Inputs const& derivatives, bool inlines, bool stores_pre_activation,
                              Reduction reduction) {
  sp::OperandTypes const types = to_operand_types(program, dtypes, kinds);
  sp::KernelText const text(kernel, derivatives, {stores_pre_activation, reduction});
  if (snippets.empty()) return text.specialize(program, types, sp::op_snippets(), inlines);
  return text.specialize(program, types, sp::OpSnippets(snippets), inlines);
}

// Fields of the struct that are padding hold what they held.
// Parameters, blocks, and threads of a block.
using KernelLaunch = std::tuple<py::bytes, int64_t, int>;

template <class Parameters>
KernelLaunch launch_of(Parameters const& parameters, int64_t blocks, int threads) {
  return {py::bytes(reinterpret_cast<char const*>(&parameters), sizeof(parameters)), blocks, threads};
}

KernelLaunch pointwise_parameters(PointwiseProblem problem) {
  if (is_empty(problem.extents)) throw py::value_error("pointwise_parameters: nothing is launched");
  LoadedKernel const specialized = {nullptr};
  problem.specialized = &specialized;
  PointwiseParameters const parameters = parameters_of(problem, 1);
  return launch_of(parameters, block_count(parameters.plan), parameters.plan.width * parameters.plan.height);
}

KernelLaunch pointwise_backward_parameters(PointwiseBackwardProblem problem, uintptr_t column_partials) {
  problem.column_partials = pointer<float>(column_partials);
  PointwiseBackwardParameters const parameters = specialized_parameters_of(problem);
  return launch_of(parameters, block_count(parameters.plan), parameters.plan.width * parameters.plan.height);
}

KernelLaunch reduce_parameters(ReduceProblem const& problem, int multiprocessors) {
  if (is_empty(problem.extents)) throw py::value_error("reduce_parameters: nothing is launched");
  PlannedReduce const planned = plan_program(problem, multiprocessors);
  ReduceProgramParameters const parameters = {parameters_of(planned), planned.problem.program,
                                              planned.problem.operands};
  return launch_of(parameters, block_count(parameters.reduce), threads_of(parameters.reduce.plan));
}

}  // namespace

void bind_kernel_text(py::module_& module) {
  module.def("op_snippets", &sp::op_snippets_text, "The PTX that specialized epilogues are put together from.");
  module.def("kernel_template", &sp::kernel_template, py::arg("kernel"),
             "The PTX of a kernel: of a GEMM by its name in the table, of another by what pointwise_kernel says; empty "
             "for another name.");
  module.def(
      "specialize_kernel", &specialize_kernel, py::arg("kernel"), py::arg("program"), py::arg("operand_types"),
      py::arg("snippets") = "", py::arg("kinds") = std::vector<sp::OperandKind>(),
      py::arg("derivatives") = sp::Inputs(), py::arg("inlines") = false, py::arg("stores_pre_activation") = true,
      py::arg("reduction") = Reduction::kNone,
      "A kernel's PTX with a program compiled in, given the types of the program's operands and how they lie "
      "(all strided unless that is said); snippets takes the place of op_snippets(). derivatives: of a kernel of "
      "such, what they are with respect to, ascending: 0 for x, k for operand k - 1. inlines: put a short program in "
      "the place of the epilogue function's calls, as the driver is given it. stores_pre_activation: whether a GEMM "
      "may be asked to. reduction: that a GEMM of rows computes, where its text is to have that alone.");
  module.def("pointwise_parameters", &pointwise_parameters, py::arg("problem"),
             "What the specialized kernel of a problem is given, and how many blocks and threads of a block are "
             "launched, on a device of one multiprocessor. For tests.");
  module.def("pointwise_backward_parameters", &pointwise_backward_parameters, py::arg("problem"),
             py::arg("column_partials"), "The same of derivatives that have a specialized kernel. For tests.");
  module.def("reduce_parameters", &reduce_parameters, py::arg("problem"), py::arg("multiprocessors"),
             "The same of a reduction, on a device of so many multiprocessors. For tests.");
}

}  // namespace cutfuse::bindings
