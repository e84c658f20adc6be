// What kernels without a product are asked for: described once for whatever finds its kernel, plans its calls or looks
// at it in a test. And the pass that splits a matrix. Part of every build.
#include <optional>

#include "bindings.h"
#include "launch/launcher.h"
#include "pointwise/pointwise_plan.h"
#include "reduce/reduce_plan.h"

namespace cutfuse::bindings {

namespace {

namespace sp = cutfuse::specialize;

PointwiseProblem make_pointwise(Program const& program, PointwiseExtents const& extents, Operand const& x,
                                std::vector<Operand> const& operands, DType out_dtype, uintptr_t out) {
  PointwiseProblem problem = {};
  problem.extents = extents;
  problem.x = x;
  problem.program = program;
  problem.operands = to_operands(program, operands);
  problem.out = pointer<void>(out);
  problem.out_dtype = out_dtype;
  return problem;
}

void set_derivatives(PointwiseBackwardProblem& problem, std::vector<WantedDerivative> const& derivatives) {
  if (derivatives.size() > static_cast<size_t>(kMaxDerivatives)) {
    throw py::value_error("pointwise_backward: " + std::to_string(derivatives.size()) + " outputs, and the limit is " +
                          std::to_string(kMaxDerivatives));
  }
  for (WantedDerivative const& wanted : derivatives) {
    if (wanted.wrt < 0 || wanted.wrt > problem.program.operand_count) {
      throw py::value_error("pointwise_backward: wrt has to be in 0.." + std::to_string(problem.program.operand_count) +
                            ", got " + std::to_string(wanted.wrt));
    }
    problem.derivatives[problem.derivative_count++] = wanted;
  }
}

PointwiseBackwardProblem make_backward(Program const& program, PointwiseExtents const& extents, Operand const& grad,
                                       Operand const& x, std::vector<Operand> const& operands,
                                       std::vector<WantedDerivative> const& outputs, bool sums_columns,
                                       Reduction reduction, bool is_accurate) {
  static float sums = 0.0f;  // stands for those of a launch
  PointwiseBackwardProblem problem = {};
  problem.extents = extents;
  problem.grad = grad;
  problem.x = x;
  problem.program = program;
  problem.operands = to_operands(program, operands);
  problem.column_partials = sums_columns ? &sums : nullptr;
  problem.reduction = reduction;
  problem.is_accurate = is_accurate;
  set_derivatives(problem, outputs);
  return problem;
}

ReduceProblem make_reduce(Program const& program, ReduceExtents const& extents, Operand const& x,
                          std::vector<Operand> const& operands, Reduction reduction, DType out_dtype,
                          bool batch_invariant, uintptr_t out, uintptr_t workspace) {
  ReduceProblem problem = {};
  problem.extents = extents;
  problem.x = x;
  problem.program = program;
  problem.operands = to_operands(program, operands);
  problem.reduction = reduction;
  problem.out = pointer<void>(out);
  problem.out_dtype = out_dtype;
  problem.workspace = pointer<float>(workspace);
  problem.batch_invariant = batch_invariant;
  return problem;
}

std::vector<sp::OperandKind> operand_kinds(ReduceProblem const& problem) {
  return kinds_of(problem.program.operand_count, specialized_operands(problem));
}

std::tuple<int64_t, int, int64_t, int64_t> backward_launch(PointwiseExtents const& extents, DType dtype, int64_t pitch,
                                                           bool keep_columns) {
  std::vector<Operand> tensors = {{nullptr, {extents.rows * pitch, pitch, 1}, dtype}};
  PointwisePlan const plan = plan_pointwise_backward(extents, tensors, {}, keep_columns);
  return {plan.extents.outer * plan.row_tiles * plan.column_tiles, plan.width * plan.height, plan.tile_columns,
          plan.column_tiles};
}

size_t workspace_bytes(ReduceExtents const& extents, DType dtype, Reduction reduction, int multiprocessors) {
  return is_empty(extents) ? 0 : reduce_workspace(extents, dtype, reduction, multiprocessors);
}

void check_cleared(ClearedWords const& cleared, int64_t rows, int64_t columns) {
  if (cleared.count == 0 || (cleared.count > 0 && cleared.words != nullptr && rows > 0 && columns > 0)) return;
  throw py::value_error("split: words to clear have to have an address, and the matrix elements, got " +
                        std::to_string(cleared.count) + " words at " + std::to_string(address(cleared.words)) +
                        " for " + pair_of(rows, columns));
}

void split(uintptr_t stream, int scheme, bool is_weight, uintptr_t source, int64_t rows, int64_t columns,
           int64_t row_stride, int64_t column_stride, uintptr_t values, uintptr_t scales, uintptr_t flags,
           std::optional<SplitGuard> const& guard, ClearedWords const& cleared) {
  check_shape("split", rows, columns);
  check_cleared(cleared, rows, columns);
  if (rows > 0 && columns > 0 && (source == 0 || values == 0 || scales == 0 || flags == 0)) {
    throw py::value_error("split: source, values, scales and flags must not be null pointers for " +
                          pair_of(rows, columns));
  }
  Planes const planes = {pointer<void>(values), pointer<float>(scales), pointer<uint32_t>(flags)};
  launcher().split({pointer<float const>(source), rows, columns, row_stride, column_stride, to_scheme(scheme),
                    is_weight, planes, cleared, guard.value_or(SplitGuard()), guard.has_value()},
                   pointer<void>(stream));
}

void bind_pointwise(py::module_& module) {
  py::class_<PointwiseProblem>(module, "PointwiseProblem",
                               "program(x, operands) over (outer, rows, columns). A tensor is (address, dtype, outer, "
                               "row and column stride). Of an address no more counts than whether it is a multiple of "
                               "32, and a call fills in its own.")
      .def(py::init(&make_pointwise), py::arg("program"), py::arg("extents"), py::arg("x"), py::arg("operands"),
           py::arg("out_dtype"), py::arg("out") = 0)
      .def_property_readonly(
          "kernel", [](PointwiseProblem const& problem) { return specialized_kernel(problem); },
          "The kernel that runs it with the program compiled in; empty where the program has to be interpreted.")
      .def(
          "find_specialization",
          [](PointwiseProblem const& problem, int device) { return sp::find_specialization(problem, device); },
          py::arg("device"), py::return_value_policy::reference,
          "The program in that kernel; None where it is interpreted for good.");
  py::class_<PointwiseBackwardProblem>(
      module, "PointwiseBackwardProblem",
      "For each output, (wrt, address, dtype), grad * weight * d program / d input, of tensors as in PointwiseProblem; "
      "sums_columns: those of the derivative with respect to x too. reduction: behind the program, which gives "
      "elements their weights. is_accurate: it is interpreted with accurate primitives, as the kernels of reductions "
      "are.")
      .def(py::init(&make_backward), py::arg("program"), py::arg("extents"), py::arg("grad"), py::arg("x"),
           py::arg("operands"), py::arg("outputs"), py::arg("sums_columns") = false,
           py::arg("reduction") = Reduction::kNone, py::arg("is_accurate") = false)
      .def_property_readonly(
          "kernel", [](PointwiseBackwardProblem const& problem) { return specialized_kernel(problem); },
          "As of PointwiseProblem, of the program's derivatives.")
      .def(
          "find_specialization",
          [](PointwiseBackwardProblem const& problem, int device) { return sp::find_specialization(problem, device); },
          py::arg("device"), py::return_value_policy::reference, "As of PointwiseProblem.");
  module.def("pointwise_backward_launch", &backward_launch, py::arg("extents"), py::arg("dtype"), py::arg("pitch"),
             py::arg("keep_columns"),
             "How the kernel that interprets is launched for rows of such a pitch in elements: blocks, threads of a "
             "block, columns of a block, and blocks beside each other. For tests.");
  module.def("pointwise_backward_row_blocks", &pointwise_backward_row_blocks, py::arg("rows"), py::arg("columns"),
             "Rows of partial sums of columns that a call of gradients writes.");
}

void bind_reduce(py::module_& module) {
  py::class_<ReduceProblem>(module, "ReduceProblem",
                            "program(x, operands), tensors as in PointwiseProblem, reduced over the middle one of "
                            "(outer, reduced, inner). batch_invariant: the order in which a row is reduced depends on "
                            "its length alone.")
      .def(py::init(&make_reduce), py::arg("program"), py::arg("extents"), py::arg("x"), py::arg("operands"),
           py::arg("reduction"), py::arg("out_dtype"), py::arg("batch_invariant") = false, py::arg("out") = 0,
           py::arg("workspace") = 0)
      .def_property_readonly(
          "kernel", [](ReduceProblem const& problem) { return specialized_kernel(problem); }, "As of PointwiseProblem.")
      .def_property_readonly("operand_kinds", &operand_kinds,
                             "How each operand lies along the lines that threads of that kernel walk along, which it "
                             "has compiled in.")
      .def(
          "find_specialization",
          [](ReduceProblem const& problem, int device) { return sp::find_specialization(problem, device); },
          py::arg("device"), py::return_value_policy::reference, "As of PointwiseProblem.");
  module.def("reduce_workspace", &workspace_bytes, py::arg("extents"), py::arg("dtype"), py::arg("reduction"),
             py::arg("multiprocessors"), "Bytes of workspace that a reduction needs, 0 for none.");
}

}  // namespace

void bind_problems(py::module_& module) {
  bind_pointwise(module);
  bind_reduce(module);
  module.def("split", &split, py::arg("stream"), py::arg("scheme"), py::arg("is_weight"), py::arg("source"),
             py::arg("rows"), py::arg("columns"), py::arg("row_stride"), py::arg("column_stride"), py::arg("values"),
             py::arg("scales"), py::arg("flags"), py::arg("guard") = py::none(), py::arg("cleared") = ClearedWords{},
             "Splits an fp32 matrix to planes, which are 128-byte aligned. guard: None, or at most two (flags, count) "
             "of split3's planes: nothing is written unless a flag says that it would lose accuracy. cleared: address "
             "and number of words that are set to zero.");
}

}  // namespace cutfuse::bindings
