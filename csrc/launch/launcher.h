// Makes the launches of a plan, by the CUDA kernels or by what a test puts in their place. Knows neither CUDA nor
// Python.
#pragma once

#include "gemm/gemm_launch.h"
#include "plan/gemm_configs.h"
#include "plan/linear_plan.h"
#include "pointwise/pointwise_plan.h"
#include "reduce/reduce_plan.h"
#include "specialize/specialization.h"
#include "split/split_plan.h"

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

// Where the tensors of a call lie. They have the layouts of the plan's request.
struct LinearBuffers {
  void const* x;
  void const* weight;
  void const* bias;  // null for none
  void* result;
  void* workspace;            // plan.workspace_bytes; null for 0
  void* weight_planes;        // null where the plan reads none
  void* pre_activation;       // null where the plan stores none, or is not fused
  JoinedWeights joined = {};  // of which weight is the first; in place of bias
};

// The program in the kernel of each FusedProduct of a plan, in their order, or in that of the pass after cuBLAS's
// product; empty where they interpret it for good.
using SpecializedEpilogues = std::vector<specialize::Specialization const*>;

// Those of a plan, made now where there are none yet. An operand of which the address is not known yet has address 0,
// and is taken for aligned.
std::vector<specialize::Specialization*> find_epilogues(LinearPlan const& plan, int device, Program const& program,
                                                        Operands const& operands);

// Each is made by launcher(): the launches of a fused plan, in their order. A product whose epilogue is not compiled
// yet interprets the program.
void launch_fused(LinearPlan const& plan, LinearBuffers const& buffers, Program const& program,
                  Operands const& operands, SpecializedEpilogues const& epilogues, Stream stream);

// Of a plan that is not fused, the launches after cuBLAS's: z is its result, contiguous, in the input's type. Nothing
// where the plan has none. `result` may be z.
void launch_after_product(LinearPlan const& plan, void const* z, void* result, void* workspace, Program const& program,
                          Operands const& operands, SpecializedEpilogues const& epilogues, Stream stream);

}  // namespace cutfuse
