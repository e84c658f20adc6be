// What makes the launches of a plan: the CUDA kernels, or what a test puts in their place. Knows neither CUDA nor
// Python.
#pragma once

#include "gemm/gemm_launch.h"
#include "plan/gemm_configs.h"
#include "pointwise/pointwise_problem.h"
#include "reduce/reduce_problem.h"
#include "split/split_problem.h"

namespace cutfuse {

// A cudaStream_t.
using Stream = void*;

// Every function throws std::invalid_argument for a problem that no kernel takes and std::runtime_error where CUDA
// refuses the launch.
class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual void split(SplitProblem const& problem, Stream stream) = 0;
  virtual void gemm(GemmConfig const& config, GemmLaunch const& launch, Stream stream) = 0;
  virtual void fold(FoldProblem const& problem, Stream stream) = 0;
  virtual void pointwise(PointwiseProblem const& problem, Stream stream) = 0;
  virtual void pointwise_backward(PointwiseBackwardProblem const& problem, Stream stream) = 0;
  virtual void reduce(ReduceProblem const& problem, Stream stream) = 0;
};

// The one of this build: the kernels, or one that throws std::runtime_error in a build without them.
Launcher& kernels();

// What makes launches now: kernels(), unless a test has put another in their place. Null puts them back.
Launcher& launcher();
void use_launcher(Launcher* other);

}  // namespace cutfuse
