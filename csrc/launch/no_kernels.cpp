// The launcher of a build without CUDA kernels.
#include <stdexcept>

#include "launch/launcher.h"

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

}  // namespace cutfuse
