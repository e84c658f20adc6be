// The launcher and the compiler of a build with CUDA kernels: the kernels, and the CUDA driver.
#include <cuda_runtime.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "gemm/dispatch.h"
#include "launch/launcher.h"
#include "pointwise/kernels.h"
#include "reduce/kernels.h"
#include "specialize/kernel_text.h"
#include "specialize/kernel_variant.h"
#include "specialize/op_snippets.h"
#include "specialize/specialization.h"
#include "split/kernels.h"

namespace cutfuse {

namespace {

cudaStream_t to_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

void check(cudaError_t status, char const* kernel, std::string const& problem) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(failure_of(kernel, status) + ", " + problem);
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
    cudaError_t const status = finalize_row_partials(problem, 1.0f, to_stream(stream));
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

namespace cutfuse::specialize {

namespace {

void check(cudaError_t status, char const* action) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next launch would otherwise report
  throw std::runtime_error(failure_of(action, status));
}

// While it lives, this thread may do what is forbidden while any other thread captures a graph: loading a kernel is
// none of the work that is captured.
class WithoutCapture {
 public:
  WithoutCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~WithoutCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  WithoutCapture(WithoutCapture const&) = delete;
  WithoutCapture& operator=(WithoutCapture const&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// What the driver's compiler says. Its memory has to live as long as the library: compiling may be put off until a
// kernel is needed, and is done again for a context that is made later where CUDA_MODULE_LOADING is EAGER.
class CompilerLog {
 public:
  // Of the JIT options, which the driver writes through.
  std::array<cudaJitOption, 4>& options() { return options_; }
  std::array<void*, 4>& values() { return values_; }

  std::string text() const { return std::string(errors_.data()) + notes_.data(); }

 private:
  static constexpr size_t kBytes = 4096;
  std::array<char, kBytes> errors_ = {};
  std::array<char, kBytes> notes_ = {};
  std::array<cudaJitOption, 4> options_ = {cudaJitErrorLogBuffer, cudaJitErrorLogBufferSizeBytes, cudaJitInfoLogBuffer,
                                           cudaJitInfoLogBufferSizeBytes};
  std::array<void*, 4> values_ = {errors_.data(), reinterpret_cast<void*>(kBytes), notes_.data(),
                                  reinterpret_cast<void*>(kBytes)};
};

// A library that is unloaded again unless it is kept, as its log then is.
class Library {
 public:
  Library() = default;
  ~Library() {
    if (library_ != nullptr) cudaLibraryUnload(library_);
  }
  Library(Library const&) = delete;
  Library& operator=(Library const&) = delete;

  cudaError_t load(std::string const& ptx) {
    return cudaLibraryLoadData(&library_, ptx.c_str(), log_->options().data(), log_->values().data(),
                               static_cast<unsigned>(log_->options().size()), nullptr, nullptr, 0);
  }
  cudaLibrary_t get() const { return library_; }
  std::string log() const { return log_->text(); }
  void keep() {
    library_ = nullptr;
    log_.release();  // NOLINT(bugprone-unused-return-value): the driver may write it again
  }

 private:
  cudaLibrary_t library_ = nullptr;
  std::unique_ptr<CompilerLog> log_ = std::make_unique<CompilerLog>();
};

// The part of a log that a message shows, in parentheses; nothing for an empty one.
std::string shown(std::string const& log) {
  constexpr size_t kShown = 500;
  return log.empty() ? std::string() : " (" + log.substr(0, kShown) + ")";
}

KernelText const& text_of(std::string_view kernel) {
  static std::mutex mutex;
  static auto* const texts = new std::map<std::string, KernelText, std::less<>>();
  std::lock_guard const lock(mutex);
  auto const found = texts->find(kernel);
  if (found != texts->end()) return found->second;
  KernelName const name = read_kernel_name(kernel);
  std::string_view const ptx = kernel_template(name.kernel_template);
  if (ptx.empty()) throw std::runtime_error("there is no PTX of " + std::string(kernel) + " in this build");
  return texts->emplace(kernel, KernelText(ptx, name.wrt, name.variant)).first->second;
}

// The driver's ptxas says so where it gives up on asynchronous matrix instructions or on registers of a warp group's:
// such a kernel would be slower than the one that interprets.
constexpr std::string_view kSlowKernel = "(C75";

std::string version_of(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

class Driver final : public KernelCompiler {
 public:
  // A driver of an older CUDA runs kernels of the same major version, and compiles no PTX of a newer one.
  std::string why_not() const override {
    int version = 0;
    check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    if (version >= CUDART_VERSION) return {};
    if (version == 0) return "there is no CUDA driver";
    return "the driver is of CUDA " + version_of(version) + ", and the kernels' PTX of CUDA " +
           version_of(CUDART_VERSION);
  }

  // Leaves the device current in this thread.
  void const* compile(std::string_view kernel, int device, Program const& program, OperandTypes const& types) override {
    KernelText const& text = text_of(kernel);
    WithoutCapture const relaxed;
    check(cudaSetDevice(device), "cudaSetDevice");
    std::string const ptx = text.specialize(program, types, op_snippets(), launches_early());
    Library library;
    cudaError_t status = library.load(ptx);
    cudaKernel_t found = nullptr;
    if (status == cudaSuccess) status = cudaLibraryGetKernel(&found, library.get(), text.name_with(program).c_str());
    auto const* const function = reinterpret_cast<void const*>(found);
    // The driver may put off compiling until the kernel is needed: now, and not at its first launch.
    cudaFuncAttributes attributes = {};
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, function);
    std::string const log = library.log();
    check(status, ("compiling the kernel" + shown(log)).c_str());
    if (log.find(kSlowKernel) != std::string::npos) {
      throw std::runtime_error("the driver's compiler warns of a slow kernel" + shown(log));
    }
    library.keep();
    return function;
  }
};

}  // namespace

KernelCompiler& driver_compiler() {
  static Driver found;
  return found;
}

}  // namespace cutfuse::specialize
