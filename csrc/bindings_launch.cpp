// What writes launches down in the place of what makes them, for tests: part of every build.
#include <optional>
#include <utility>

#include "bindings.h"
#include "launch/launcher.h"

namespace cutfuse::bindings {
namespace {

using Callback = py::typing::Callable<void(py::str, py::typing::Dict<py::str, py::object>)>;

uintptr_t function_of(LoadedKernel const* kernel) { return address(kernel == nullptr ? nullptr : kernel->function); }

py::list list_of(JoinedWeights const& joined) {
  py::list list;
  for (int k = 0; k < joined.count; ++k) {
    JoinedWeight const& item = joined.items[k];
    list.append(py::make_tuple(address(item.weight), address(item.bias), item.columns));
  }
  return list;
}

// Gives a Python function the name and the arguments of each launch.
class Recorder final : public Launcher {
 public:
  explicit Recorder(Callback callback) : callback_(std::move(callback)) {}

  void split(SplitProblem const& problem, Stream stream) override {
    py::gil_scoped_acquire const gil;
    py::dict launch = begin(stream);
    launch["scheme"] = static_cast<int>(problem.scheme);
    launch["is_weight"] = problem.is_weight;
    launch["source"] = address(problem.source);
    launch["rows"] = problem.rows;
    launch["columns"] = problem.columns;
    launch["row_stride"] = problem.row_stride;
    launch["column_stride"] = problem.column_stride;
    launch["values"] = address(problem.planes.values);
    launch["scales"] = address(problem.planes.scales);
    launch["flags"] = address(problem.planes.flags);
    launch["guard"] = problem.guarded ? py::cast(problem.only_if) : py::none();
    launch["cleared"] = problem.cleared;
    callback_("split", launch);
  }

  void gemm(GemmConfig const& config, GemmLaunch const& gemm, Stream stream) override {
    py::gil_scoped_acquire const gil;
    GemmBuffers const& buffers = gemm.buffers;
    py::dict launch = begin(stream);
    launch["problem"] = gemm.problem;
    launch["kernel"] = config.name;
    launch["tile_m"] = config.tile_m;
    launch["tile_n"] = config.tile_n;
    launch["slice_count"] = buffers.slices.count;
    launch["bias"] = address(buffers.bias);
    launch["d"] = address(buffers.d);
    launch["partials"] = address(buffers.partials);
    launch["pre_activation"] = address(buffers.pre_activation);
    launch["swizzle"] = gemm.swizzle;
    launch["raster_along_m"] = gemm.raster_along_m;
    launch["specialized"] = function_of(gemm.specialized);
    StagedOperands const staged = staged_by(gemm.specialized);
    launch["staged"] = py::make_tuple(staged.source, staged.rows, staged.columns);
    add(launch, gemm.program, gemm.operands);
    if (!is_over_planes(product_of(config))) {
      launch["a"] = address(buffers.a);
      launch["b"] = address(buffers.b);
      if (buffers.joined.count > 0) launch["joined"] = list_of(buffers.joined);
      callback_("gemm", launch);
      return;
    }
    launch["a"] = py::make_tuple(address(buffers.planes_a.values), address(buffers.planes_a.scales));
    launch["slices"] = py::make_tuple(address(buffers.slices.sums), address(buffers.slices.arrived));
    launch["guard"] = buffers.guard;
    launch["run"] = buffers.run;
    ConvertedOperand const& converted = buffers.converted_b;
    if (converts_weight(product_of(config))) {
      launch["b"] = py::make_tuple(address(converted.data), converted.pitch, converted.columns,
                                   address(converted.flags), converted.flag_count);
      callback_("gemm_convert", launch);
    } else {
      launch["b"] = py::make_tuple(address(buffers.planes_b.values), address(buffers.planes_b.scales));
      callback_("gemm_planes", launch);
    }
  }

  void fold(FoldProblem const& problem, Stream stream) override {
    py::gil_scoped_acquire const gil;
    py::dict launch = begin(stream);
    launch["partials"] = address(problem.partials);
    launch["tiles"] = problem.tiles;
    launch["rows"] = problem.rows;
    launch["reduction"] = problem.reduction;
    launch["count"] = problem.count;
    launch["out"] = address(problem.out);
    launch["out_dtype"] = problem.out_dtype;
    launch["batch_invariant"] = problem.batch_invariant;
    callback_("finalize_partials", launch);
  }

  void pointwise(PointwiseProblem const& problem, Stream stream) override {
    py::gil_scoped_acquire const gil;
    py::dict launch = begin(problem, stream);
    launch["out"] = address(problem.out);
    launch["out_dtype"] = problem.out_dtype;
    launch["out_pitch"] = problem.out_pitch;
    callback_("pointwise", launch);
  }

  void pointwise_backward(PointwiseBackwardProblem const& problem, Stream stream) override {
    py::gil_scoped_acquire const gil;
    py::dict launch = begin(problem, stream);
    launch["grad"] = problem.grad;
    launch["outputs"] = std::vector(problem.derivatives, problem.derivatives + problem.derivative_count);
    launch["column_partials"] = address(problem.column_partials);
    launch["reduction"] = problem.reduction;
    launch["row_result"] = address(problem.row_result);
    launch["tie_count"] = address(problem.tie_count);
    launch["is_accurate"] = problem.is_accurate;
    callback_("pointwise_backward", launch);
  }

  void reduce(ReduceProblem const& problem, Stream stream) override {
    py::gil_scoped_acquire const gil;
    py::dict launch = begin(problem, stream);
    launch["reduction"] = problem.reduction;
    launch["out"] = address(problem.out);
    launch["out_dtype"] = problem.out_dtype;
    launch["workspace"] = address(problem.workspace);
    launch["batch_invariant"] = problem.batch_invariant;
    callback_("reduce", launch);
  }

 private:
  static py::dict begin(Stream stream) {
    py::dict launch;
    launch["stream"] = address(stream);
    return launch;
  }

  // Of a kernel without a product.
  template <class Problem>
  static py::dict begin(Problem const& problem, Stream stream) {
    py::dict launch = begin(stream);
    launch["extents"] = problem.extents;
    launch["x"] = problem.x;
    launch["specialized"] = function_of(problem.specialized);
    add(launch, problem.program, problem.operands);
    return launch;
  }

  static void add(py::dict& launch, Program const& program, Operands const& operands) {
    launch["program"] = program;
    launch["operands"] = std::vector(operands.items, operands.items + program.operand_count);
  }

  Callback callback_;
};

void record_launches(std::optional<Callback> const& callback) {
  static Recorder* recorder = nullptr;
  use_launcher(nullptr);
  delete std::exchange(recorder, callback ? new Recorder(*callback) : nullptr);
  use_launcher(recorder);
}

}  // namespace

void bind_launch(py::module_& module) {
  module.def("record_launches", &record_launches, py::arg("callback").none(true),
             "Gives callback(function, arguments) each launch instead of making it; None makes launches again. For "
             "tests.");
}

}  // namespace cutfuse::bindings
