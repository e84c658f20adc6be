// The CUDA driver as the compiler of specialized kernels.
#include <cuda_runtime.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "specialize/kernel_compiler.h"
#include "specialize/kernel_name.h"
#include "specialize/kernel_template.h"
#include "specialize/kernel_text.h"
#include "specialize/op_snippets.h"

namespace cutfuse::specialize {

namespace {

void check(cudaError_t status, char const* action) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next launch would otherwise report
  throw std::runtime_error(std::string(action) + " failed with " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + ")");
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
    std::string const ptx = text.specialize(program, types, op_snippets());
    WithoutCapture const relaxed;
    check(cudaSetDevice(device), "cudaSetDevice");
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
