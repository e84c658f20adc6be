// The GEMM's share of cutfuse._C.
#include "bindings.h"
#include "gemm/dispatch.h"
#include "gemm/heuristics.h"

namespace cutfuse::bindings {
namespace {

GemmProblem make_problem(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int input, int output,
                         int reduction, int multiprocessors, float epilogue_cost) {
  return {
      m, n, k, lda, ldb, to_dtype(input), to_dtype(output), to_reduction(reduction), multiprocessors, epilogue_cost};
}

GemmConfig const& config_of(GemmCandidate const& candidate) { return gemm_configs()[candidate.config]; }

void gemm(uintptr_t stream, GemmProblem const& problem, GemmCandidate const& candidate, uintptr_t a, uintptr_t b,
          uintptr_t bias, uintptr_t d, uintptr_t partials, Program const& program,
          std::vector<MatrixTuple> const& operands) {
  GemmLaunch launch{};
  launch.problem = problem;
  launch.buffers = {pointer<void const>(a), pointer<void const>(b), pointer<void const>(bias), pointer<void>(d),
                    pointer<float>(partials)};
  launch.program = program;
  launch.operands = to_operands(program, operands);
  launch.swizzle = candidate.swizzle;
  launch.raster_along_m = candidate.raster_along_m;
  run_gemm(config_of(candidate), launch, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

void bind_gemm(py::module_& module) {
  py::class_<GemmProblem>(module, "GemmProblem", "What the choice of a GEMM kernel depends on.")
      .def(py::init(&make_problem), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("lda"), py::arg("ldb"),
           py::arg("input"), py::arg("output"), py::arg("reduction"), py::arg("multiprocessors"),
           py::arg("epilogue_cost") = 0.0f)
      .def("__repr__", [](GemmProblem const& problem) { return describe(problem); });
  py::class_<GemmCandidate>(module, "GemmCandidate", "A GEMM kernel with its prediction, or the reason against it.")
      .def_property_readonly("name", [](GemmCandidate const& candidate) { return config_of(candidate).name; })
      .def_property_readonly("tile_m", [](GemmCandidate const& candidate) { return config_of(candidate).tile_m; })
      .def_property_readonly("tile_n", [](GemmCandidate const& candidate) { return config_of(candidate).tile_n; })
      .def_readonly("rejection", &GemmCandidate::rejection)
      .def_readonly("microseconds", &GemmCandidate::microseconds)
      .def_readwrite("swizzle", &GemmCandidate::swizzle)
      .def_readwrite("raster_along_m", &GemmCandidate::raster_along_m);
  module.def("gemm_candidates", &rank_gemm_configs, py::arg("problem"),
             "Every kernel of the table: the runnable ones first, by predicted time.");
  module.def("unfused_microseconds", &predict_unfused_microseconds, py::arg("problem"),
             "What cuBLAS and one pointwise or reduction kernel after it would take, predicted.");
  module.def("gemm", &gemm, py::arg("stream"), py::arg("problem"), py::arg("candidate"), py::arg("a"), py::arg("b"),
             py::arg("bias"), py::arg("d"), py::arg("partials"), py::arg("program"), py::arg("operands"),
             "Launches a candidate. Pointers and the stream are integers; 0 for no bias, and for whichever of d and "
             "partials the kernel does not write.");
}

}  // namespace cutfuse::bindings
