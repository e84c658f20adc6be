// The kernels without a product: which run a call, and the pass that splits a matrix. Part of every build.
#include <optional>

#include "bindings.h"
#include "launch/launcher.h"
#include "pointwise/pointwise_plan.h"
#include "reduce/reduce_plan.h"

namespace cutfuse::bindings {

namespace {

// Address and number of words that are set to zero.
using ClearedTuple = std::tuple<uintptr_t, int>;

void check_cleared(ClearedTuple const& cleared, int64_t rows, int64_t columns) {
  auto const [address, count] = cleared;
  if (count == 0 || (count > 0 && address != 0 && rows > 0 && columns > 0)) return;
  throw py::value_error("split: words to clear have to have an address, and the matrix elements, got " +
                        std::to_string(count) + " words at " + std::to_string(address) + " for " +
                        pair_of(rows, columns));
}

void split(uintptr_t stream, int scheme, bool is_weight, uintptr_t source, int64_t rows, int64_t columns,
           int64_t row_stride, int64_t column_stride, uintptr_t values, uintptr_t scales, uintptr_t flags,
           std::optional<std::vector<FlagsTuple>> const& guard, ClearedTuple const& cleared) {
  check_shape("split", rows, columns);
  check_cleared(cleared, rows, columns);
  SplitProblem problem = {};
  problem.source = pointer<float const>(source);
  problem.rows = rows;
  problem.columns = columns;
  problem.row_stride = row_stride;
  problem.column_stride = column_stride;
  problem.scheme = to_scheme(scheme);
  problem.is_weight = is_weight;
  problem.planes = {pointer<void>(values), pointer<float>(scales), pointer<uint32_t>(flags)};
  problem.cleared = {pointer<int32_t>(std::get<0>(cleared)), std::get<1>(cleared)};
  problem.guarded = guard.has_value();
  if (guard) problem.only_if = to_guard(*guard);
  if (rows > 0 && columns > 0 && (source == 0 || values == 0 || scales == 0 || flags == 0)) {
    throw py::value_error("split: source, values, scales and flags must not be null pointers for " +
                          pair_of(rows, columns));
  }
  launcher().split(problem, pointer<void>(stream));
}

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

std::tuple<int64_t, int, int64_t, int64_t> backward_launch(Extents const& extents, int dtype, int64_t pitch,
                                                           bool keep_columns) {
  std::vector<Operand> tensors = {{nullptr, {extents[1] * pitch, pitch, 1}, to_dtype(dtype)}};
  PointwisePlan const plan = plan_pointwise_backward({extents[0], extents[1], extents[2]}, tensors, {}, keep_columns);
  return {plan.extents.outer * plan.row_tiles * plan.column_tiles, plan.width * plan.height, plan.tile_columns,
          plan.column_tiles};
}

// A call of reduce of which the result does not matter.
ReduceProblem without_result(Program const& program, Extents const& extents, MatrixTuple const& x,
                             std::vector<MatrixTuple> const& operands, int reduction) {
  return to_problem(program, extents, x, operands, reduction, 0, static_cast<int>(DType::kFloat32), 0);
}

std::string find_reduce_kernel(Program const& program, Extents const& extents, MatrixTuple const& x,
                               std::vector<MatrixTuple> const& operands, int reduction) {
  return specialized_kernel(without_result(program, extents, x, operands, reduction));
}

std::vector<specialize::OperandKind> find_operand_kinds(Program const& program, Extents const& extents,
                                                        MatrixTuple const& x, std::vector<MatrixTuple> const& operands,
                                                        int reduction) {
  return kinds_of(program.operand_count,
                  specialized_operands(without_result(program, extents, x, operands, reduction)));
}

size_t workspace_bytes(Extents const& extents, int dtype, int reduction, int multiprocessors) {
  check_extents("reduce_workspace", extents);
  if (is_empty(extents)) return 0;
  return reduce_workspace({extents[0], extents[1], extents[2]}, to_dtype(dtype), to_reduction(reduction),
                          multiprocessors);
}

}  // namespace

void bind_split(py::module_& module) {
  module.def("split", &split, py::arg("stream"), py::arg("scheme"), py::arg("is_weight"), py::arg("source"),
             py::arg("rows"), py::arg("columns"), py::arg("row_stride"), py::arg("column_stride"), py::arg("values"),
             py::arg("scales"), py::arg("flags"), py::arg("guard") = py::none(),
             py::arg("cleared") = ClearedTuple(0, 0),
             "Splits an fp32 matrix to planes, which are 128-byte aligned. guard: None, or at most two (flags, count) "
             "of split3's planes: nothing is written unless a flag says that it would lose accuracy. cleared: address "
             "and number of words that are set to zero.");
}

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
  module.def("pointwise_kernel", &find_kernel, py::arg("program"), py::arg("extents"), py::arg("x"),
             py::arg("operands"), py::arg("out"), py::arg("out_dtype"),
             "The kernel that such a pointwise_call runs with its program compiled in; empty where the program has to "
             "be interpreted. Of an address no more counts than whether it is a multiple of 16.");
  module.def("pointwise_backward_kernel", &find_backward_kernel, py::arg("program"), py::arg("extents"),
             py::arg("grad"), py::arg("x"), py::arg("operands"), py::arg("outputs"), py::arg("sums_columns"),
             "The kernel that such a backward_call, without a reduction, runs with the program's derivatives compiled "
             "in; empty where they have to be interpreted. Of an address no more counts than "
             "whether it is a multiple of 32.");
  module.def("pointwise_backward_launch", &backward_launch, py::arg("extents"), py::arg("dtype"), py::arg("pitch"),
             py::arg("keep_columns"),
             "How the kernel that interprets is launched for rows of such a pitch in elements: blocks, threads of a "
             "block, columns of a block, and blocks beside each other. For tests.");
  module.def("pointwise_backward_row_blocks", &pointwise_backward_row_blocks, py::arg("rows"), py::arg("columns"),
             "Rows of partial sums of columns that a backward_call writes.");
}

ReduceProblem to_problem(Program const& program, Extents const& extents, MatrixTuple const& x,
                         std::vector<MatrixTuple> const& operands, int reduction, uintptr_t out, int out_dtype,
                         uintptr_t workspace) {
  check_extents("reduce", extents);
  ReduceProblem problem = {};
  problem.extents = {extents[0], extents[1], extents[2]};
  problem.x = to_operand(x);
  problem.program = program;
  problem.operands = to_operands(program, operands);
  problem.reduction = to_reduction(reduction);
  problem.out = pointer<void>(out);
  problem.out_dtype = to_dtype(out_dtype);
  problem.workspace = pointer<float>(workspace);
  return problem;
}

void bind_reduce(py::module_& module) {
  module.def("reduce_kernel", &find_reduce_kernel, py::arg("program"), py::arg("extents"), py::arg("x"),
             py::arg("operands"), py::arg("reduction"),
             "The kernel that such a reduce_call runs with its program compiled in; empty where the program has to "
             "be interpreted. Of an address no more counts than whether it is a multiple of 16.");
  module.def("reduce_operand_kinds", &find_operand_kinds, py::arg("program"), py::arg("extents"), py::arg("x"),
             py::arg("operands"), py::arg("reduction"),
             "How each operand lies along the lines that threads of that kernel walk along, which it has compiled in.");
  module.def("reduce_workspace", &workspace_bytes, py::arg("extents"), py::arg("dtype"), py::arg("reduction"),
             py::arg("multiprocessors"), "Bytes of workspace that a reduce_call needs, 0 for none.");
}

}  // namespace cutfuse::bindings
