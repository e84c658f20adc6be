// The launcher of a build with CUDA kernels.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "gemm/dispatch.h"
#include "launch/launcher.h"
#include "pointwise/pointwise.h"
#include "reduce/reduce.h"
#include "split/split.h"

namespace cutfuse {

namespace {

cudaStream_t to_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

void check(cudaError_t status, char const* kernel, std::string const& problem) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(kernel) + " failed with " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + "), " + problem);
}

using GetCurrentContext = int (*)(void** context);  // cuCtxGetCurrent, whose types are in a header of the driver's

GetCurrentContext find_get_current_context() {
  constexpr unsigned kSinceCuda = 4000;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  cudaError_t const status =
      cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &entry, kSinceCuda, cudaEnableDefault, &found);
  check(status, "cudaGetDriverEntryPointByVersion", "of cuCtxGetCurrent");
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the CUDA driver has no cuCtxGetCurrent");
  return reinterpret_cast<GetCurrentContext>(entry);
}

// A GEMM's tensor maps are encoded by the driver, which, unlike the runtime, needs a context that is current in this
// thread. A thread that has made no call of the runtime yet has none: PyTorch's allocator may have had memory for it.
void make_context_current() {
  static GetCurrentContext const get_current = find_get_current_context();
  void* context = nullptr;
  if (get_current(&context) == 0 && context != nullptr) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", "before a thread's first kernel");
  check(cudaSetDevice(device), "cudaSetDevice", "device " + std::to_string(device));
}

std::string sizes(int64_t first, int64_t second) { return std::to_string(first) + ", " + std::to_string(second); }

std::string extents_of(PointwiseExtents const& extents) {
  return "extents (" + sizes(extents.outer, extents.rows) + ", " + std::to_string(extents.columns) + ")";
}

class Kernels final : public Launcher {
 public:
  void split(SplitProblem const& problem, Stream stream) override {
    cudaError_t const status = run_split(problem, to_stream(stream));
    if (status == cudaSuccess) return;
    check(status, "split",
          "shape (" + sizes(problem.rows, problem.columns) + "), strides (" +
              sizes(problem.row_stride, problem.column_stride) + "), plan " +
              std::to_string(static_cast<int>(problem.scheme)));
  }

  void gemm(GemmConfig const& config, GemmLaunch const& launch, Stream stream) override {
    make_context_current();
    run_gemm(config, launch, to_stream(stream));
  }

  void fold(FoldProblem const& problem, Stream stream) override {
    cudaError_t const status =
        finalize_row_partials(problem.partials, problem.tiles, problem.rows, problem.reduction, problem.count, 1.0f,
                              problem.out, problem.out_dtype, true, to_stream(stream));
    if (status == cudaSuccess) return;
    check(status, "finalize_partials",
          "extents (" + sizes(problem.tiles, problem.rows) + ", 1), " + name_of(problem.out_dtype));
  }

  void pointwise(PointwiseProblem const& problem, Stream stream) override {
    cudaError_t const status = run_pointwise(problem, to_stream(stream));
    if (status == cudaSuccess) return;
    check(status, "pointwise", extents_of(problem.extents) + ", " + name_of(problem.x.dtype));
  }

  void pointwise_backward(PointwiseBackwardProblem const& problem, Stream stream) override {
    cudaError_t const status = run_pointwise_backward(problem, to_stream(stream));
    if (status == cudaSuccess) return;
    check(status, "pointwise_backward", extents_of(problem.extents) + ", " + name_of(problem.x.dtype));
  }

  void reduce(ReduceProblem const& problem, Stream stream) override {
    cudaError_t const status = run_reduce(problem, to_stream(stream));
    if (status == cudaSuccess) return;
    ReduceExtents const& extents = problem.extents;
    check(status, "reduce",
          extents_of({extents.outer, extents.reduced, extents.inner}) + ", " + name_of(problem.x.dtype));
  }
};

}  // namespace

Launcher& kernels() {
  static Kernels found;
  return found;
}

}  // namespace cutfuse
