// The planner's share of cutfuse._C: part of every build, with and without CUDA kernels.
#include <optional>

#include "bindings.h"
#include "plan/gemm_configs.h"
#include "plan/linear_plan.h"
#include "plan/plane_products.h"
#include "plan/predictions.h"
#include "split/split_plan.h"

namespace cutfuse::bindings {
namespace {

using ShapeTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

LinearRequest make_request(MatrixLayout const& x, MatrixLayout const& weight, std::optional<VectorLayout> const& bias,
                           DType input, DType output, Reduction reduction, float epilogue_cost,
                           std::optional<float> specialized_cost, float generated_cost, float operand_bytes,
                           float fetched_bytes, Precision precision, bool weight_has_planes, bool stores_pre_activation,
                           DeviceFacts device, Issuer issuer, std::vector<int64_t> const& joined_rows,
                           bool batch_invariant, std::string const& times) {
  if (!times.empty()) device.times = &times_of(times);
  return {x,
          weight,
          joined_rows,
          bias,
          input,
          output,
          reduction,
          epilogue_cost,
          specialized_cost,
          generated_cost,
          operand_bytes,
          fetched_bytes,
          precision,
          weight_has_planes,
          stores_pre_activation,
          batch_invariant,
          device,
          issuer};
}

ShapeTuple shape_and_bytes(int64_t rows, int64_t columns, int scheme, bool transposed, bool is_weight) {
  check_shape("planes_shape", rows, columns);
  PlanesShape const shape = planes_shape(rows, columns, to_scheme(scheme), transposed, is_weight);
  return {shape.pitch, shape.scale_pitch, shape.flag_count, shape.value_bytes, shape.scale_bytes, shape.flag_bytes};
}

WeightPlanes weight_planes(int64_t rows, int64_t columns, int scheme, bool transposed) {
  check_shape("weight_planes", rows, columns);
  return lay_weight_planes(planes_shape(rows, columns, to_scheme(scheme), transposed, true));
}

void bind_gemm_choice(py::module_& module) {
  py::class_<GemmProblem>(module, "GemmProblem", "What a GEMM kernel is asked for.")
      .def_readonly("m", &GemmProblem::m)
      .def_readonly("n", &GemmProblem::n)
      .def_readonly("k", &GemmProblem::k)
      .def_readonly("lda", &GemmProblem::lda, "Elements between rows of x, or between its columns.")
      .def_readonly("ldb", &GemmProblem::ldb, "Elements between rows of the weight, or between its columns.")
      .def_property_readonly("ldd", &pitch_of_result, "Elements between rows of the stored matrix.")
      .def_property_readonly(
          "reads_columns_of_x", [](GemmProblem const& problem) { return reads_columns_of_x(problem.layout); },
          "Whether x's columns are contiguous, and not its rows.")
      .def_property_readonly(
          "reads_columns_of_weight", [](GemmProblem const& problem) { return reads_columns_of_weight(problem.layout); },
          "Whether the weight's columns are contiguous, and not its rows.")
      .def_readonly("input", &GemmProblem::input)
      .def_readonly("output", &GemmProblem::output)
      .def_readonly("reduction", &GemmProblem::reduction)
      .def("__repr__", [](GemmProblem const& problem) { return describe(problem); });
  module.def(
      "gemm_kernels",
      [] {
        std::vector<std::string> names;
        for (GemmConfig const& config : gemm_configs()) names.emplace_back(config.name);
        return names;
      },
      "The names of the GEMM kernels of the table, also of those that this build does not have.");
  py::class_<GemmCandidate>(module, "GemmCandidate", "A GEMM kernel, how it is launched and what it takes.")
      .def_property_readonly("name", [](GemmCandidate const& candidate) { return config_of(candidate).name; })
      .def_property_readonly("tile_m", [](GemmCandidate const& candidate) { return config_of(candidate).tile_m; })
      .def_property_readonly("tile_n", [](GemmCandidate const& candidate) { return config_of(candidate).tile_n; })
      .def_readonly("rejection", &GemmCandidate::rejection)
      .def_readonly("microseconds", &GemmCandidate::microseconds)
      .def_readonly("slices", &GemmCandidate::slices)
      .def_readonly("swizzle", &GemmCandidate::swizzle)
      .def_readonly("raster_along_m", &GemmCandidate::raster_along_m);
}

void bind_request(py::module_& module) {
  py::enum_<SplitScheme>(module, "SplitScheme", "How an fp32 matrix is split into planes of 16-bit parts.")
      .value("split3", SplitScheme::kSplit3)
      .value("split6", SplitScheme::kSplit6);
  py::enum_<SplitRun>(module, "RunWhen", "When a launch over planes runs; otherwise it returns at once.")
      .value("always", SplitRun::kAlways)
      .value("if_clear", SplitRun::kIfClear)
      .value("if_tripped", SplitRun::kIfTripped);
  py::enum_<Precision> precision(module, "Precision", "How fp32 matrices are multiplied.");
  for (int value = 0; value < kPrecisionCount; ++value) {
    precision.value(name_of(static_cast<Precision>(value)), static_cast<Precision>(value));
  }
  py::enum_<Issuer>(module, "Issuer", "What issues a plan's launches.")
      .value("call", Issuer::kCall)
      .value("training", Issuer::kTraining)
      .value("compiled_code", Issuer::kCompiledCode)
      .value("compiled_cpp", Issuer::kCompiledCpp)
      .value("graph", Issuer::kGraph);
  module.attr("plane_advantage") = kPlaneAdvantage;
  module.def("first_scheme", &first_scheme, py::arg("precision"), "What of a weight is split as a rule.");
  py::class_<LinearRequest>(module, "LinearRequest",
                            "What the plan of reduce(program(x @ weight.T + bias, operands)) depends on.")
      .def(py::init(&make_request), py::kw_only(), py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("input"),
           py::arg("output"), py::arg("reduction"), py::arg("epilogue_cost"), py::arg("specialized_cost"),
           py::arg("generated_cost"), py::arg("operand_bytes"), py::arg("fetched_bytes"), py::arg("precision"),
           py::arg("weight_has_planes"), py::arg("stores_pre_activation"), py::arg("device"), py::arg("issuer"),
           py::arg("joined_rows") = std::vector<int64_t>{}, py::arg("batch_invariant") = false, py::arg("times") = "",
           "A matrix is (rows, columns, row stride, column stride, whether it begins at a multiple of 16 bytes), bias "
           "None or (stride, the same), device (compute capability's two numbers, multiprocessors). Strides are in "
           "elements; types and the reduction are codes of dtypes() and reductions(), 0 for no reduction. "
           "specialized_cost: None where the fused kernels are to interpret the program. fetched_bytes: of "
           "operand_bytes, those of a matrix that a kernel's copy engine may bring. "
           "weight_has_planes: those of the scheme that the precision takes first. stores_pre_activation: x @ weight.T "
           "+ bias is a second result. In compiled code the kernel behind "
           "cuBLAS's product is torch.compile's, and a graph's launches take nothing of the host. "
           "joined_rows: the rows of each of several weights, which are `weight` together. batch_invariant: a row's "
           "bits are "
           "the same however many rows x has. times: the name of the device of device_times() by which it is "
           "predicted; the first one for an empty name.");
}

std::vector<double> predict_ways(std::vector<LinearRequest> requests, std::string const& way, std::string const& device,
                                 std::map<std::string, double> const& numbers) {
  DeviceTimes const times = with_numbers(times_of(device), numbers);
  std::vector<double> microseconds;
  for (LinearRequest& request : requests) {
    request.device.times = &times;
    microseconds.push_back(predict_way(request, way));
  }
  return microseconds;
}

void bind_device_times(py::module_& module) {
  module.def(
      "device_times",
      [] {
        std::map<std::string, std::tuple<int, double, std::map<std::string, double>>> found;
        for (DeviceTimes const& times : device_times()) {
          found[times.name] = {times.multiprocessors, times.gigabytes_per_second, named_numbers(times.numbers)};
        }
        return found;
      },
      "The devices that have a table of times, by their names: (multiprocessors, the memory's gigabytes in a second, "
      "numbers by their names).");
  module.def(
      "predict_ways", &predict_ways, py::arg("requests"), py::arg("way"), py::arg("device"), py::arg("numbers"),
      "The microseconds that a way of computing 16-bit or tf32 layers is predicted to take by the table of a device, "
      "with these numbers in the place of its own: a kernel of gemm_kernels(), or for another name cuBLAS with what "
      "follows its product.");
}

void bind_memory(py::module_& module) {
  py::enum_<Memory>(module, "Memory", "Whose memory a piece is of.")
      .value("workspace", Memory::kWorkspace)
      .value("weight_planes", Memory::kWeightPlanes);
  py::class_<Piece>(module, "Piece", "Memory that launches hand on: an offset into a larger one, in bytes.")
      .def_readonly("memory", &Piece::memory)
      .def_readonly("offset", &Piece::offset)
      .def_readonly("bytes", &Piece::bytes);
  py::class_<PlanesPieces>(module, "PlanesPieces", "What a pass that splits a matrix leaves.")
      .def_readonly("values", &PlanesPieces::values)
      .def_readonly("scales", &PlanesPieces::scales)
      .def_readonly("flags", &PlanesPieces::flags);
  py::class_<WeightPlanes>(module, "WeightPlanes", "The planes of a weight in memory of their own.")
      .def_readonly("pieces", &WeightPlanes::pieces)
      .def_readonly("bytes", &WeightPlanes::bytes);
  module.def("weight_planes", &weight_planes, py::arg("rows"), py::arg("columns"), py::arg("scheme"),
             py::arg("transposed"), "The memory of a weight's planes by plan 3 or 6; transposed as in planes_shape.");
  module.def("planes_shape", &shape_and_bytes, py::arg("rows"), py::arg("columns"), py::arg("scheme"),
             py::arg("transposed"), py::arg("is_weight"),
             "(pitch, scale_pitch, flag_count, bytes of values, of scales, of flags) of a matrix split by plan 3 or 6; "
             "transposed: its column stride is not 1; is_weight: it is a product's second operand.");
}

void bind_launches(py::module_& module) {
  py::class_<SplitPass>(module, "SplitPass", "Splits x or the weight into planes.")
      .def_readonly("is_weight", &SplitPass::is_weight)
      .def_readonly("scheme", &SplitPass::scheme)
      .def_readonly("planes", &SplitPass::planes)
      .def_readonly("cleared", &SplitPass::cleared)
      .def_readonly("guard", &SplitPass::guard)
      .def_readonly("when", &SplitPass::when);
  py::enum_<CopiedMatrix>(module, "CopiedMatrix", "Which matrix of a product is copied.")
      .value("x", CopiedMatrix::kX)
      .value("weight", CopiedMatrix::kWeight)
      .value("result", CopiedMatrix::kResult);
  py::class_<AlignedCopy>(module, "AlignedCopy",
                          "Copies an operand to lines that the copy engine takes, or the result from such lines.")
      .def_readonly("matrix", &AlignedCopy::matrix)
      .def_readonly("lines", &AlignedCopy::lines)
      .def_readonly("length", &AlignedCopy::length)
      .def_readonly("from_pitch", &AlignedCopy::from_pitch)
      .def_readonly("to_pitch", &AlignedCopy::to_pitch)
      .def_readonly("aligned", &AlignedCopy::aligned);
  py::class_<FusedProduct>(module, "FusedProduct", "The matrix product with what follows it, by one kernel.")
      .def_readonly("problem", &FusedProduct::problem)
      .def_readonly("kernel", &FusedProduct::kernel)
      .def_readonly("x", &FusedProduct::x)
      .def_readonly("weight", &FusedProduct::weight)
      .def_readonly("result", &FusedProduct::result)
      .def_readonly("weight_flags", &FusedProduct::weight_flags)
      .def_readonly("sums", &FusedProduct::sums)
      .def_readonly("arrivals", &FusedProduct::arrivals)
      .def_readonly("partials", &FusedProduct::partials)
      .def_readonly("guard", &FusedProduct::guard)
      .def_readonly("when", &FusedProduct::when);
  py::class_<FoldPartials>(module, "FoldPartials", "Folds the partials of a row reduction to the result.")
      .def_readonly("partials", &FoldPartials::partials)
      .def_readonly("tiles", &FoldPartials::tiles)
      .def_readonly("batch_invariant", &FoldPartials::batch_invariant);
  py::class_<CublasProduct>(module, "CublasProduct", "x @ weight.T + bias by PyTorch.");
  py::class_<PointwisePass>(module, "PointwisePass", "program(z, operands) over cuBLAS's result.")
      .def_readonly("in_place", &PointwisePass::in_place);
  py::class_<ReductionPass>(module, "ReductionPass", "reduce(program(z, operands)) over cuBLAS's result.");
}

void bind_linear_plan(py::module_& module) {
  py::class_<Alternative>(module, "Alternative", "A way of computing a linear layer, with all its launches.")
      .def_readonly("name", &Alternative::name)
      .def_readonly("microseconds", &Alternative::microseconds)
      .def_readonly("compared", &Alternative::compared)
      .def_readonly("slices", &Alternative::slices)
      .def_readonly("rejection", &Alternative::rejection);
  py::class_<LinearPlan>(module, "LinearPlan", "How a linear layer is computed, and why not otherwise.")
      .def_readonly("ruled_out", &LinearPlan::ruled_out)
      .def_readonly("alternatives", &LinearPlan::alternatives)
      .def_readonly("chosen", &LinearPlan::chosen)
      .def_readonly("launches", &LinearPlan::launches)
      .def_readonly("workspace_bytes", &LinearPlan::workspace_bytes)
      .def_readonly("output_shape", &LinearPlan::output_shape)
      .def_property_readonly("specializes",
                             [](LinearPlan const& plan) { return plan.request.specialized_cost.has_value(); })
      .def_readonly("copies_bias", &LinearPlan::copies_bias)
      .def_readonly("reads_weight_planes", &LinearPlan::reads_weight_planes)
      .def_property_readonly("is_fused", &LinearPlan::is_fused);
  module.def("why_no_kernels", &why_no_kernels, py::arg("device"),
             "Why no fused kernel runs on a device, described as in a request; empty where they do.");
  module.def("predict_memory_microseconds", &predict_memory_microseconds, py::arg("bytes"),
             "The microseconds that reading or writing so many bytes takes behind the kernel that stores them.");
  module.def(
      "compare_passes",
      [](int64_t m, int64_t n, int64_t k, float forward_bytes, float backward_bytes, Program const& program,
         bool sums_columns, int32_t multiprocessors, Issuer issuer) {
        StepTimes const times =
            compare_passes({m, n, k, forward_bytes, backward_bytes, specialized_cost_of(program, false),
                            generated_cost_of(program), sums_columns, multiprocessors, issuer});
        return std::make_pair(times.own, times.generated);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("forward_bytes"), py::arg("backward_bytes"), py::arg("program"),
      py::arg("sums_columns"), py::arg("multiprocessors"), py::arg("issuer"),
      "The microseconds of a 16-bit layer's training step in compiled code, by cuBLAS's products: with kernels of ours "
      "for what follows them, forwards and backwards, and with torch.compile's. Bytes: those that are read and written "
      "for each element.");
  module.def("training_waits_for_host", &training_waits_for_host, py::arg("shape"), py::arg("dtype"),
             py::arg("multiprocessors"), py::arg("as_tf32"),
             "Whether the host takes longer to issue the training step of a layer (M, N, K) whose products cuBLAS runs "
             "than the device to run it; as_tf32: fp32 products do so in tf32.");
  module.def("mlp_waits_for_host", &mlp_waits_for_host, py::arg("first"), py::arg("last"), py::arg("dtype"),
             py::arg("multiprocessors"), py::arg("as_tf32"),
             "The same of an MLP as one node, by the shapes of its first layer and of its last.");
  module.def("plan_linear", &plan_linear, py::arg("request"), py::arg("only") = "",
             "The plan of a request; only: the name of the one alternative that is wanted, whatever it would take.");
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_gemm_choice(module);
  bind_request(module);
  bind_device_times(module);
  bind_memory(module);
  bind_launches(module);
  bind_linear_plan(module);
}

}  // namespace cutfuse::bindings
