// The GEMM's share of cutfuse._C.
#include "bindings.h"
#include "gemm/dispatch.h"
#include "plan/gemm_candidates.h"

namespace cutfuse::bindings {
namespace {

GemmConfig const& config_of(GemmCandidate const& candidate) { return gemm_configs()[candidate.config]; }

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

void gemm_convert(uintptr_t stream, GemmProblem const& problem, GemmCandidate const& candidate, PlanesTuple const& a,
                  ConvertedTuple const& b, SlicesTuple const& slices, std::vector<FlagsTuple> const& guard,
                  SplitRun run, uintptr_t bias, uintptr_t d, uintptr_t partials, Program const& program,
                  std::vector<MatrixTuple> const& operands) {
  GemmLaunch launch = make_launch(problem, candidate, bias, d, partials, program, operands);
  launch.buffers.planes_a = to_planes(a);
  launch.buffers.converted_b = to_converted(b);
  launch.buffers.slices = to_slices(candidate, slices);
  launch.buffers.guard = to_guard(guard);
  launch.buffers.run = run;
  run_gemm(config_of(candidate), launch, reinterpret_cast<cudaStream_t>(stream));
}

void gemm_planes(uintptr_t stream, GemmProblem const& problem, GemmCandidate const& candidate, PlanesTuple const& a,
                 PlanesTuple const& b, SlicesTuple const& slices, std::vector<FlagsTuple> const& guard, SplitRun run,
                 uintptr_t bias, uintptr_t d, uintptr_t partials, Program const& program,
                 std::vector<MatrixTuple> const& operands) {
  GemmLaunch launch = make_launch(problem, candidate, bias, d, partials, program, operands);
  launch.buffers.planes_a = to_planes(a);
  launch.buffers.planes_b = to_planes(b);
  launch.buffers.slices = to_slices(candidate, slices);
  launch.buffers.guard = to_guard(guard);
  launch.buffers.run = run;
  run_gemm(config_of(candidate), launch, reinterpret_cast<cudaStream_t>(stream));
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

}  // namespace cutfuse::bindings
