// The pointwise kernels' share of cutfuse._C: programs and their derivatives.
#include "bindings.h"
#include "launch/launcher.h"
#include "pointwise/pointwise_plan.h"
#include "pointwise/specialized_plan.h"

namespace cutfuse::bindings {
namespace {

std::string find_kernel(Program const& program, Extents const& extents, MatrixTuple const& x,
                        std::vector<MatrixTuple> const& operands, uintptr_t out, int out_dtype) {
  return specialized_kernel(to_problem(program, extents, x, operands, out, out_dtype));
}

std::string find_backward_kernel(Program const& program, Extents const& extents, MatrixTuple const& grad,
                                 MatrixTuple const& x, std::vector<MatrixTuple> const& operands,
                                 std::vector<DerivativeTuple> const& outputs, bool sums_columns) {
  PointwiseBackwardProblem problem = to_backward_problem(program, extents, grad, x, operands, outputs);
  float sums = 0.0f;
  if (sums_columns) problem.column_partials = &sums;
  return specialized_kernel(problem);
}

void pointwise(uintptr_t stream, Program const& program, Extents const& extents, MatrixTuple const& x,
               std::vector<MatrixTuple> const& operands, uintptr_t out, int out_dtype,
               OptionalSpecialization const& specialization) {
  PointwiseProblem problem = to_problem(program, extents, x, operands, out, out_dtype);
  problem.specialized = loaded(specialization);
  check_pointer("pointwise", "x", problem.x.data, extents);
  check_pointer("pointwise", "out", problem.out, extents);
  launcher().pointwise(problem, pointer<void>(stream));
}

void set_derivatives(PointwiseBackwardProblem& problem, std::vector<DerivativeTuple> const& derivatives) {
  if (derivatives.size() > static_cast<size_t>(kMaxDerivatives)) {
    throw py::value_error("pointwise_backward: at most " + std::to_string(kMaxDerivatives) + " outputs, got " +
                          std::to_string(derivatives.size()));
  }
  for (auto const& [wrt, data, dtype] : derivatives) {
    if (wrt < 0 || wrt > problem.program.operand_count) {
      throw py::value_error("pointwise_backward: wrt has to be in 0.." + std::to_string(problem.program.operand_count) +
                            ", got " + std::to_string(wrt));
    }
    WantedDerivative& wanted = problem.derivatives[problem.derivative_count++];
    wanted = {wrt, pointer<void>(data), to_dtype(dtype)};
  }
}

void check_weights(PointwiseBackwardProblem const& problem, Extents const& extents) {
  if (needs_result(problem.reduction)) {
    check_pointer("pointwise_backward", "row_result", problem.row_result, extents);
  }
  if (counts_ties(problem.reduction)) check_pointer("pointwise_backward", "tie_count", problem.tie_count, extents);
  if (problem.column_partials != nullptr && extents[0] != 1) {
    throw py::value_error("pointwise_backward: column sums need one outer index, got extents " + to_string(extents));
  }
}

void pointwise_backward(uintptr_t stream, Program const& program, Extents const& extents, MatrixTuple const& grad,
                        MatrixTuple const& x, std::vector<MatrixTuple> const& operands,
                        std::vector<DerivativeTuple> const& outputs, uintptr_t column_partials, int reduction,
                        uintptr_t row_result, uintptr_t tie_count, OptionalSpecialization const& specialization,
                        bool is_accurate) {
  if (is_accurate && specialization) {
    throw py::value_error(
        "pointwise_backward: with is_accurate the program is interpreted: specialization must be None");
  }
  PointwiseBackwardProblem problem = to_backward_problem(program, extents, grad, x, operands, outputs);
  problem.column_partials = pointer<float>(column_partials);
  problem.reduction = to_reduction(reduction);
  problem.row_result = pointer<float const>(row_result);
  problem.tie_count = pointer<float const>(tie_count);
  problem.specialized = loaded(specialization);
  problem.is_accurate = is_accurate;
  for (WantedDerivative const* wanted = problem.derivatives; wanted < problem.derivatives + problem.derivative_count;
       ++wanted) {
    check_pointer("pointwise_backward", "an output", wanted->data, extents);
  }
  check_pointer("pointwise_backward", "x", problem.x.data, extents);
  check_pointer("pointwise_backward", "grad", problem.grad.data, extents);
  check_weights(problem, extents);
  launcher().pointwise_backward(problem, pointer<void>(stream));
}

std::tuple<int64_t, int, int64_t, int64_t> backward_launch(Extents const& extents, int dtype, int64_t pitch,
                                                           bool keep_columns) {
  std::vector<PointwiseTensor> tensors = {{{extents[1] * pitch, pitch, 1}, to_dtype(dtype), 0}};
  PointwisePlan const plan = plan_pointwise_backward({extents[0], extents[1], extents[2]}, tensors, {}, keep_columns);
  return {plan.extents.outer * plan.row_tiles * plan.column_tiles, plan.width * plan.height, plan.tile_columns,
          plan.column_tiles};
}

}  // namespace

PointwiseBackwardProblem to_backward_problem(Program const& program, Extents const& extents, MatrixTuple const& grad,
                                             MatrixTuple const& x, std::vector<MatrixTuple> const& operands,
                                             std::vector<DerivativeTuple> const& outputs) {
  check_extents("pointwise_backward", extents);
  PointwiseBackwardProblem problem = {};
  problem.extents = {extents[0], extents[1], extents[2]};
  problem.grad = to_operand(grad);
  problem.x = to_operand(x);
  problem.program = program;
  problem.operands = to_operands(program, operands);
  problem.reduction = Reduction::kNone;
  set_derivatives(problem, outputs);
  return problem;
}

PointwiseProblem to_problem(Program const& program, Extents const& extents, MatrixTuple const& x,
                            std::vector<MatrixTuple> const& operands, uintptr_t out, int out_dtype) {
  check_extents("pointwise", extents);
  PointwiseProblem problem = {};
  problem.extents = {extents[0], extents[1], extents[2]};
  problem.x = to_operand(x);
  problem.program = program;
  problem.operands = to_operands(program, operands);
  problem.out = pointer<void>(out);
  problem.out_dtype = to_dtype(out_dtype);
  return problem;
}

void bind_pointwise(py::module_& module) {
  module.def("pointwise", &pointwise, py::arg("stream"), py::arg("program"), py::arg("extents"), py::arg("x"),
             py::arg("operands"), py::arg("out"), py::arg("out_dtype"), py::arg("specialization"),
             "out = program(x, operands) over (outer, rows, columns); out is contiguous. A tensor is (pointer, dtype, "
             "outer, row and column stride in elements). specialization: the program in the kernel that "
             "pointwise_kernel names; None to interpret it.");
  module.def(
      "pointwise_kernel", &find_kernel, py::arg("program"), py::arg("extents"), py::arg("x"), py::arg("operands"),
      py::arg("out"), py::arg("out_dtype"),
      "The kernel that such a call of pointwise runs with its program compiled in; empty where the program has to "
      "be interpreted. Of an address no more counts than whether it is a multiple of 16.");
  module.def("pointwise_backward", &pointwise_backward, py::arg("stream"), py::arg("program"), py::arg("extents"),
             py::arg("grad"), py::arg("x"), py::arg("operands"), py::arg("outputs"), py::arg("column_partials"),
             py::arg("reduction"), py::arg("row_result"), py::arg("tie_count"), py::arg("specialization"),
             py::arg("is_accurate") = false,
             "For each output (wrt, pointer, dtype): grad * weight * d program / d input, contiguous. column_partials: "
             "fp32 [pointwise_backward_row_blocks, columns] or 0. row_result, tie_count: fp32 [outer, rows] or 0. "
             "specialization: the program in the kernel that pointwise_backward_kernel names; None to interpret it. "
             "is_accurate: it is interpreted with accurate primitives, as the kernels of reductions are.");
  module.def("pointwise_backward_kernel", &find_backward_kernel, py::arg("program"), py::arg("extents"),
             py::arg("grad"), py::arg("x"), py::arg("operands"), py::arg("outputs"), py::arg("sums_columns"),
             "The kernel that such a call of pointwise_backward, without a reduction, runs with the program's "
             "derivatives compiled in; empty where they have to be interpreted. Of an address no more counts than "
             "whether it is a multiple of 32.");
  module.def("pointwise_backward_launch", &backward_launch, py::arg("extents"), py::arg("dtype"), py::arg("pitch"),
             py::arg("keep_columns"),
             "How the kernel that interprets is launched for rows of such a pitch in elements: blocks, threads of a "
             "block, columns of a block, and blocks beside each other. For tests.");
  module.def("pointwise_backward_row_blocks", &pointwise_backward_row_blocks, py::arg("rows"), py::arg("columns"),
             "Rows of column partial sums that pointwise_backward writes.");
}

}  // namespace cutfuse::bindings
