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
                              Reduction reduction, bool launches_early) {
  sp::OperandTypes const types = to_operand_types(program, dtypes, kinds);
  sp::KernelText const text(kernel, derivatives, {stores_pre_activation, reduction});
  if (snippets.empty()) return text.specialize(program, types, sp::op_snippets(), launches_early, inlines);
  return text.specialize(program, types, sp::OpSnippets(snippets), launches_early, inlines);
}

// Blocks, and threads of a block.
using LaunchShape = std::pair<int64_t, int>;

LaunchShape backward_launch_shape(PointwiseBackwardProblem problem, uintptr_t column_partials) {
  problem.column_partials = pointer<float>(column_partials);
  PointwiseBackwardParameters const parameters = specialized_parameters_of(problem);
  return {block_count(parameters.plan), parameters.plan.width * parameters.plan.height};
}

std::vector<LaunchShape> reduce_launch_shapes(ReduceProblem const& problem, int multiprocessors) {
  if (is_empty(problem.extents)) return {};
  PlannedReduce const planned = plan_program(problem, multiprocessors);
  std::vector<LaunchShape> launches;
  bool const is_folded = planned.plan.path == ReducePath::kFolded;
  if (!is_folded) launches.emplace_back(block_count(parameters_of(planned)), threads_of(planned.plan));
  if (is_folded || planned.plan.partial_rows > 0) {
    FoldProblem const fold = fold_of(problem, planned);
    launches.emplace_back(ceil_divide(fold.rows, fold_width(fold)), kBlockThreads);
  }
  return launches;
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
      py::arg("reduction") = Reduction::kNone, py::arg("launches_early") = false,
      "A kernel's PTX with a program compiled in, given the types of the program's operands and how they lie "
      "(all strided unless that is said); snippets takes the place of op_snippets(). derivatives: of a kernel of "
      "such, what they are with respect to, ascending: 0 for x, k for operand k - 1. inlines: put a short program in "
      "the place of the epilogue function's calls, as the driver is given it. stores_pre_activation: whether a GEMM "
      "may be asked to. reduction: that a GEMM of rows computes, where its text is to have that alone. launches_early: "
      "of another kernel, for devices on which it waits for the previous one.");
  module.def(
      "backward_launch_shape", &backward_launch_shape, py::arg("problem"), py::arg("column_partials"),
      "How many blocks and threads of a block are launched of the specialized kernel of derivatives. For tests.");
  module.def("reduce_launch_shapes", &reduce_launch_shapes, py::arg("problem"), py::arg("multiprocessors"),
             "The same of each launch of a reduction, on a device of so many multiprocessors. For tests.");
}

}  // namespace cutfuse::bindings
