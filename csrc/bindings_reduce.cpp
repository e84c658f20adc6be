// The reduction kernels' share of cutfuse._C.
#include "bindings.h"
#include "launch/launcher.h"
#include "reduce/program_plan.h"
#include "reduce/reduce_plan.h"

namespace cutfuse::bindings {
namespace {

void check_reduction(char const* kernel, Reduction reduction) {
  if (reduction == Reduction::kNone) {
    throw py::value_error(std::string(kernel) + ": reduction has to be one of reductions(), got 0 (none)");
  }
}

std::string find_kernel(Program const& program, Extents const& extents, MatrixTuple const& x,
                        std::vector<MatrixTuple> const& operands, int reduction) {
  constexpr int kAnyType = static_cast<int>(DType::kFloat32);
  return specialized_kernel(to_problem(program, extents, x, operands, reduction, 0, kAnyType, 0));
}

std::vector<specialize::OperandKind> find_operand_kinds(Program const& program, Extents const& extents,
                                                        MatrixTuple const& x, std::vector<MatrixTuple> const& operands,
                                                        int reduction) {
  constexpr int kAnyType = static_cast<int>(DType::kFloat32);
  return kinds_of(program.operand_count,
                  specialized_operands(to_problem(program, extents, x, operands, reduction, 0, kAnyType, 0)));
}

void check_operands(ReduceProblem const& problem, OptionalSpecialization const& specialization) {
  specialize::Specialization const* const given = specialization.value_or(nullptr);
  if (given == nullptr || given->operand_types() == specialized_operands(problem)) return;
  throw py::value_error("reduce: the specialization " + given->kernel() +
                        " is of operands of other types or kinds: see reduce_operand_kinds");
}

void reduce(uintptr_t stream, Program const& program, Extents const& extents, MatrixTuple const& x,
            std::vector<MatrixTuple> const& operands, int reduction, uintptr_t out, int out_dtype, uintptr_t workspace,
            OptionalSpecialization const& specialization) {
  ReduceProblem problem = to_problem(program, extents, x, operands, reduction, out, out_dtype, workspace);
  problem.specialized = loaded(specialization);
  check_reduction("reduce", problem.reduction);
  check_operands(problem, specialization);
  check_pointer("reduce", "x", problem.x.data, extents);
  check_pointer("reduce", "out", problem.out, extents);
  launcher().reduce(problem, pointer<void>(stream));
}

void finalize(uintptr_t stream, uintptr_t partials, int64_t tiles, int64_t rows, int reduction, int64_t count,
              uintptr_t out, int out_dtype) {
  Extents const extents = {tiles, rows, 1};
  check_extents("finalize_partials", extents);
  Reduction const to_fold = to_reduction(reduction);
  DType const dtype = to_dtype(out_dtype);
  check_reduction("finalize_partials", to_fold);
  check_pointer("finalize_partials", "partials", pointer<void>(partials), extents);
  check_pointer("finalize_partials", "out", pointer<void>(out), extents);
  launcher().fold({pointer<float const>(partials), tiles, rows, to_fold, count, pointer<void>(out), dtype},
                  pointer<void>(stream));
}

size_t workspace_bytes(Extents const& extents, int dtype, int reduction, int multiprocessors) {
  check_extents("reduce_workspace", extents);
  if (is_empty(extents)) return 0;
  return reduce_workspace({extents[0], extents[1], extents[2]}, to_dtype(dtype), to_reduction(reduction),
                          multiprocessors);
}

}  // namespace

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
  module.def("reduce", &reduce, py::arg("stream"), py::arg("program"), py::arg("extents"), py::arg("x"),
             py::arg("operands"), py::arg("reduction"), py::arg("out"), py::arg("out_dtype"), py::arg("workspace"),
             py::arg("specialization"),
             "Reduces program(x, operands) over the middle one of (outer, reduced, inner) to out [outer, inner]. "
             "specialization: the program in the kernel that reduce_kernel names; None to interpret it.");
  module.def("reduce_kernel", &find_kernel, py::arg("program"), py::arg("extents"), py::arg("x"), py::arg("operands"),
             py::arg("reduction"),
             "The kernel that such a call of reduce runs with its program compiled in; empty where the program has to "
             "be interpreted. Of an address no more counts than whether it is a multiple of 16.");
  module.def("reduce_operand_kinds", &find_operand_kinds, py::arg("program"), py::arg("extents"), py::arg("x"),
             py::arg("operands"), py::arg("reduction"),
             "How each operand lies along the lines that threads of that kernel walk along, which it has compiled in.");
  module.def("finalize_partials", &finalize, py::arg("stream"), py::arg("partials"), py::arg("tiles"), py::arg("rows"),
             py::arg("reduction"), py::arg("count"), py::arg("out"), py::arg("out_dtype"),
             "Folds fp32 partial states [tiles, rows] (pairs for logsumexp) to out [rows]; the mean divides by count.");
  module.def("reduce_workspace", &workspace_bytes, py::arg("extents"), py::arg("dtype"), py::arg("reduction"),
             py::arg("multiprocessors"), "Bytes of workspace that reduce needs, 0 for none.");
}

}  // namespace cutfuse::bindings
