// GEMM kernels, and the texts that specialized kernels are put together from: of builds with kernels.
#include "bindings.h"
#include "gemm/dispatch.h"
#include "plan/gemm_configs.h"
#include "pointwise/kernels.h"
#include "reduce/kernels.h"
#include "specialize/kernel_text.h"
#include "specialize/op_snippets.h"

namespace cutfuse::bindings {

namespace {

GemmLaunch make_launch(GemmProblem const& problem, GemmCandidate const& candidate, uintptr_t bias, uintptr_t d,
                       uintptr_t partials, Program const& program, std::vector<MatrixTuple> const& operands) {
  GemmLaunch launch{};
  launch.problem = problem;
  launch.buffers.bias = pointer<void const>(bias);
  launch.buffers.d = pointer<void>(d);
  launch.buffers.partials = pointer<float>(partials);
  launch.program = program;
  launch.operands = to_operands(program, operands);
  launch.buffers.slices.count = 1;
  launch.swizzle = candidate.swizzle;
  launch.raster_along_m = candidate.raster_along_m;
  return launch;
}

void gemm(uintptr_t stream, GemmProblem const& problem, GemmCandidate const& candidate, uintptr_t a, uintptr_t b,
          uintptr_t bias, uintptr_t d, uintptr_t partials, Program const& program,
          std::vector<MatrixTuple> const& operands) {
  GemmLaunch launch = make_launch(problem, candidate, bias, d, partials, program, operands);
  launch.buffers.a = pointer<void const>(a);
  launch.buffers.b = pointer<void const>(b);
  run_gemm(config_of(candidate), launch, reinterpret_cast<cudaStream_t>(stream));
}

// Values and scales of one operand's planes.
using PlanesTuple = std::tuple<uintptr_t, uintptr_t>;

Planes to_planes(PlanesTuple const& planes) {
  return {pointer<void>(std::get<0>(planes)), pointer<float>(std::get<1>(planes)), nullptr};
}

// Address, row pitch and columns of an fp32 operand, then address and number of the flags that converting it leaves.
using ConvertedTuple = std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, int>;

ConvertedOperand to_converted(ConvertedTuple const& operand) {
  auto const [data, pitch, columns, flags, flag_count] = operand;
  return {pointer<float const>(data), pitch, columns, pointer<uint32_t>(flags), flag_count};
}

// Addresses of the sums and the arrivals of slices of K; 0 where the candidate has one.
using SlicesTuple = std::tuple<uintptr_t, uintptr_t>;

KSlices to_slices(GemmCandidate const& candidate, SlicesTuple const& slices) {
  return {candidate.slices, pointer<float>(std::get<0>(slices)), pointer<int32_t>(std::get<1>(slices))};
}

void launch_over_planes(GemmLaunch& launch, uintptr_t stream, GemmCandidate const& candidate, PlanesTuple const& a,
                        SlicesTuple const& slices, std::vector<FlagsTuple> const& guard, SplitRun run) {
  launch.buffers.planes_a = to_planes(a);
  launch.buffers.slices = to_slices(candidate, slices);
  launch.buffers.guard = to_guard(guard);
  launch.buffers.run = run;
  run_gemm(config_of(candidate), launch, reinterpret_cast<cudaStream_t>(stream));
}

void gemm_convert(uintptr_t stream, GemmProblem const& problem, GemmCandidate const& candidate, PlanesTuple const& a,
                  ConvertedTuple const& b, SlicesTuple const& slices, std::vector<FlagsTuple> const& guard,
                  SplitRun run, uintptr_t bias, uintptr_t d, uintptr_t partials, Program const& program,
                  std::vector<MatrixTuple> const& operands) {
  GemmLaunch launch = make_launch(problem, candidate, bias, d, partials, program, operands);
  launch.buffers.converted_b = to_converted(b);
  launch_over_planes(launch, stream, candidate, a, slices, guard, run);
}

void gemm_planes(uintptr_t stream, GemmProblem const& problem, GemmCandidate const& candidate, PlanesTuple const& a,
                 PlanesTuple const& b, SlicesTuple const& slices, std::vector<FlagsTuple> const& guard, SplitRun run,
                 uintptr_t bias, uintptr_t d, uintptr_t partials, Program const& program,
                 std::vector<MatrixTuple> const& operands) {
  GemmLaunch launch = make_launch(problem, candidate, bias, d, partials, program, operands);
  launch.buffers.planes_b = to_planes(b);
  launch_over_planes(launch, stream, candidate, a, slices, guard, run);
}

namespace sp = cutfuse::specialize;

std::string specialize_kernel(std::string const& kernel, Program const& program, std::vector<int> const& dtypes,
                              std::string const& snippets, std::vector<sp::OperandKind> const& kinds,
                              sp::Inputs const& derivatives, bool inlines, bool stores_pre_activation, int reduction) {
  sp::OperandTypes const types = to_operand_types(program, dtypes, kinds);
  sp::KernelText const text(kernel, derivatives, {stores_pre_activation, to_reduction(reduction)});
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

KernelLaunch pointwise_parameters(Program const& program, Extents const& extents, MatrixTuple const& x,
                                  std::vector<MatrixTuple> const& operands, uintptr_t out, int out_dtype) {
  if (is_empty(extents)) throw py::value_error("pointwise_parameters: nothing is launched for " + to_string(extents));
  LoadedKernel const specialized = {nullptr};
  PointwiseProblem problem = to_problem(program, extents, x, operands, out, out_dtype);
  problem.specialized = &specialized;
  PointwiseParameters const parameters = parameters_of(problem, 1);
  return launch_of(parameters, block_count(parameters.plan), parameters.plan.width * parameters.plan.height);
}

KernelLaunch pointwise_backward_parameters(Program const& program, Extents const& extents, MatrixTuple const& grad,
                                           MatrixTuple const& x, std::vector<MatrixTuple> const& operands,
                                           std::vector<DerivativeTuple> const& outputs, uintptr_t column_partials) {
  PointwiseBackwardProblem problem = to_backward_problem(program, extents, grad, x, operands, outputs);
  problem.column_partials = pointer<float>(column_partials);
  PointwiseBackwardParameters const parameters = specialized_parameters_of(problem);
  return launch_of(parameters, block_count(parameters.plan), parameters.plan.width * parameters.plan.height);
}

KernelLaunch reduce_parameters(Program const& program, Extents const& extents, MatrixTuple const& x,
                               std::vector<MatrixTuple> const& operands, int reduction, uintptr_t out, int out_dtype,
                               uintptr_t workspace, int multiprocessors) {
  if (is_empty(extents)) throw py::value_error("reduce_parameters: nothing is launched for " + to_string(extents));
  ReduceProblem const problem = to_problem(program, extents, x, operands, reduction, out, out_dtype, workspace);
  PlannedReduce const planned = plan_program(problem, multiprocessors);
  ReduceProgramParameters const parameters = {parameters_of(planned), planned.problem.program,
                                              planned.problem.operands};
  return launch_of(parameters, block_count(parameters.reduce), threads_of(parameters.reduce.plan));
}

}  // namespace

void bind_gemm(py::module_& module) {
  module.def("gemm", &gemm, py::arg("stream"), py::arg("problem"), py::arg("candidate"), py::arg("a"), py::arg("b"),
             py::arg("bias"), py::arg("d"), py::arg("partials"), py::arg("program"), py::arg("operands"),
             "Launches a candidate. Pointers and the stream are integers; 0 for no bias, and for whichever of d and "
             "partials the kernel does not write.");
  module.def("gemm_planes", &gemm_planes, py::arg("stream"), py::arg("problem"), py::arg("candidate"), py::arg("a"),
             py::arg("b"), py::arg("slices"), py::arg("guard"), py::arg("run"), py::arg("bias"), py::arg("d"),
             py::arg("partials"), py::arg("program"), py::arg("operands"),
             "Launches a candidate over planes: a and b are addresses of values and scales, slices those of the sums "
             "(a tile's elements in fp32 for each slice of each tile) and the arrivals (int32 for each tile, zero when "
             "the product starts: split clears them) of a candidate with slices of K, guard up to two pairs of flags "
             "and their number.");
  module.def(
      "gemm_convert", &gemm_convert, py::arg("stream"), py::arg("problem"), py::arg("candidate"), py::arg("a"),
      py::arg("b"), py::arg("slices"), py::arg("guard"), py::arg("run"), py::arg("bias"), py::arg("d"),
      py::arg("partials"), py::arg("program"), py::arg("operands"),
      "Like gemm_planes, with b in fp32: its address, row pitch and columns, and address and number of the flags "
      "that converting it leaves (0 for none).");
}

void bind_kernel_text(py::module_& module) {
  module.def("op_snippets", &sp::op_snippets_text, "The PTX that specialized epilogues are put together from.");
  module.def("kernel_template", &sp::kernel_template, py::arg("kernel"),
             "The PTX of a kernel: of a GEMM by its name in the table, of another by what pointwise_kernel says; empty "
             "for another name.");
  module.def(
      "specialize_kernel", &specialize_kernel, py::arg("kernel"), py::arg("program"), py::arg("operand_types"),
      py::arg("snippets") = "", py::arg("kinds") = std::vector<sp::OperandKind>(),
      py::arg("derivatives") = sp::Inputs(), py::arg("inlines") = false, py::arg("stores_pre_activation") = true,
      py::arg("reduction") = 0,
      "A kernel's PTX with a program compiled in, given the types of the program's operands and how they lie "
      "(all strided unless that is said); snippets takes the place of op_snippets(). derivatives: of a kernel of "
      "such, what they are with respect to, ascending: 0 for x, k for operand k - 1. inlines: put a short program in "
      "the place of the epilogue function's calls, as the driver is given it. stores_pre_activation: whether a GEMM "
      "may be asked to. reduction: that a GEMM of rows computes, where its text is to have that alone.");
  module.def(
      "pointwise_parameters", &pointwise_parameters, py::arg("program"), py::arg("extents"), py::arg("x"),
      py::arg("operands"), py::arg("out"), py::arg("out_dtype"),
      "What the specialized kernel of such a call of pointwise is given, and how many blocks and threads of a block "
      "are launched, on a device of one multiprocessor. For tests.");
  module.def("pointwise_backward_parameters", &pointwise_backward_parameters, py::arg("program"), py::arg("extents"),
             py::arg("grad"), py::arg("x"), py::arg("operands"), py::arg("outputs"), py::arg("column_partials"),
             "The same of a call of pointwise_backward that has a specialized kernel. For tests.");
  module.def("reduce_parameters", &reduce_parameters, py::arg("program"), py::arg("extents"), py::arg("x"),
             py::arg("operands"), py::arg("reduction"), py::arg("out"), py::arg("out_dtype"), py::arg("workspace"),
             py::arg("multiprocessors"),
             "The same of such a call of reduce, on a device of so many multiprocessors. For tests.");
}

}  // namespace cutfuse::bindings
