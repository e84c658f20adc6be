// The launcher and the compiler of a build without CUDA kernels.
#include <stdexcept>

#include "launch/launcher.h"
#include "specialize/specialization.h"

namespace cutfuse {

namespace {

[[noreturn]] void refuse() { throw std::runtime_error("cutfuse was built without CUDA kernels: nothing is launched"); }

class NoKernels final : public Launcher {
 public:
  void split(SplitProblem const&, Stream) override { refuse(); }
  void gemm(GemmConfig const&, GemmLaunch const&, Stream) override { refuse(); }
  void fold(FoldProblem const&, Stream) override { refuse(); }
  void pointwise(PointwiseProblem const&, Stream) override { refuse(); }
  void pointwise_backward(PointwiseBackwardProblem const&, Stream) override { refuse(); }
  void reduce(ReduceProblem const&, Stream) override { refuse(); }
};

}  // namespace

Launcher& kernels() {
  static NoKernels found;
  return found;
}

namespace specialize {

namespace {

class NoTemplates final : public KernelCompiler {
 public:
  std::string why_not() const override { return "cutfuse was built without CUDA kernels"; }
  void const* compile(std::string_view, int, Program const&, OperandTypes const&) override {
    throw std::runtime_error(why_not() + ": there is nothing to compile a program into");
  }
};

}  // namespace

KernelCompiler& driver_compiler() {
  static NoTemplates found;
  return found;
}

}  // namespace specialize

}  // namespace cutfuse
