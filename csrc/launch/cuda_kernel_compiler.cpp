// The CUDA driver as the compiler of specialized kernels.
#include <cuda_runtime.h>

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "specialize/kernel_compiler.h"
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

// Makes a device current in this thread while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(OnDevice const&) = delete;
  OnDevice& operator=(OnDevice const&) = delete;

 private:
  int before_ = 0;
};

KernelText const& text_of(std::string_view kernel) {
  static std::mutex mutex;
  static auto* const texts = new std::map<std::string, KernelText, std::less<>>();
  std::lock_guard const lock(mutex);
  auto const found = texts->find(kernel);
  if (found != texts->end()) return found->second;
  std::string_view const ptx = kernel_template(kernel);
  if (ptx.empty()) throw std::runtime_error("there is no PTX of " + std::string(kernel) + " in this build");
  return texts->emplace(kernel, KernelText(ptx)).first->second;
}

// The driver's ptxas says so where it gives up on asynchronous matrix instructions or on registers of a warp group's:
// such a kernel would be slower than the one that interprets.
constexpr std::string_view kSlowKernel = "C75";

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

  void const* compile(std::string_view kernel, int device, Program const& program, OperandTypes const& types) override {
    KernelText const& text = text_of(kernel);
    std::string const ptx = text.specialize(program, types, op_snippets());
    WithoutCapture const relaxed;
    OnDevice const on_device(device);
    cudaLibrary_t const library = load(ptx);
    cudaKernel_t found = nullptr;
    check(cudaLibraryGetKernel(&found, library, text.name_with(program).c_str()), "cudaLibraryGetKernel");
    auto const* const function = reinterpret_cast<void const*>(found);
    // The driver compiles for a device when the kernel is first needed there: now, and not at its first launch.
    cudaFuncAttributes attributes = {};
    check(cudaFuncGetAttributes(&attributes, function), "compiling the kernel");
    return function;
  }

 private:
  static cudaLibrary_t load(std::string const& ptx) {
    constexpr size_t kLogBytes = 8192;
    std::array<char, kLogBytes> errors = {};
    std::array<char, kLogBytes> notes = {};
    auto* const size = reinterpret_cast<void*>(kLogBytes);
    std::array<cudaJitOption, 4> options = {cudaJitErrorLogBuffer, cudaJitErrorLogBufferSizeBytes, cudaJitInfoLogBuffer,
                                            cudaJitInfoLogBufferSizeBytes};
    std::array<void*, 4> values = {errors.data(), size, notes.data(), size};
    cudaLibrary_t library = nullptr;
    cudaError_t const status = cudaLibraryLoadData(&library, ptx.c_str(), options.data(), values.data(),
                                                   static_cast<unsigned>(options.size()), nullptr, nullptr, 0);
    std::string const log = std::string(errors.data()) + notes.data();
    if (status != cudaSuccess) check(status, ("cudaLibraryLoadData (" + log.substr(0, 500) + ")").c_str());
    if (log.find(kSlowKernel) != std::string::npos) {
      cudaLibraryUnload(library);
      throw std::runtime_error("the driver's compiler warns of a slow kernel: " + log.substr(0, 500));
    }
    return library;
  }
};

}  // namespace

KernelCompiler& driver_compiler() {
  static Driver found;
  return found;
}

}  // namespace cutfuse::specialize
