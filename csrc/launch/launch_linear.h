// Makes the launches of a linear layer's plan.
#pragma once

#include "launch/launcher.h"
#include "plan/linear_plan.h"
#include "specialize/specialization.h"

namespace cutfuse {

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

// The launches of a fused plan, in their order. A product whose epilogue is not compiled yet interprets the program.
void launch_fused(LinearPlan const& plan, LinearBuffers const& buffers, Program const& program,
                  Operands const& operands, SpecializedEpilogues const& epilogues, Launcher& launcher, Stream stream);

// Of a plan that is not fused, the launches after cuBLAS's: z is its result, contiguous, in the input's type. Nothing
// where the plan has none. `result` may be z.
void launch_after_product(LinearPlan const& plan, void const* z, void* result, void* workspace, Program const& program,
                          Operands const& operands, SpecializedEpilogues const& epilogues, Launcher& launcher,
                          Stream stream);

}  // namespace cutfuse
