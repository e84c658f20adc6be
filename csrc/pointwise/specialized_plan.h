// Which pointwise launches take a kernel with the program compiled in. Host code that knows no CUDA.
#pragma once

#include <string>
#include <vector>

#include "pointwise/pointwise_problem.h"

namespace cutfuse {

// Vectors of a thread and row where the program is compiled in, and threads of a block. Chosen for a sigmoid of
// 4096x393216 on an H200, with a kernel of that op alone: 3003 us in fp32 and 1500 us in bf16 (a copy takes 3021 and
// 1511), with 256 threads 3070 and 1540, with loads that are evicted first 3290 and 1625, with a loop over eight rows
// 3480 and 1720.
constexpr int kChainVectors = 2;
constexpr int kVectorThreads = 128;

// Pieces of a vector of a thread at a time, in the kernels of derivatives.
constexpr int kBackwardPieces = kChainVectors;

// What a block of such a kernel takes: a short block without a loop reaches the copy bandwidth.
PointwiseBlock compiled_block(DType dtype);

// The name of the template for tensors of this type.
std::string specialized_template(DType dtype);

// The template of the kernel that runs the problem with its program compiled in; empty where the program has to be
// interpreted, because rows are no whole vectors, there are too many of them or there is nothing to interpret. Whether
// it is empty depends on extents, strides, types and the alignment of x and the result to 16 bytes alone.
std::string specialized_kernel(PointwiseProblem const& problem);

// A backward problem over the extents and with the strides of a plan.
struct BackwardPlan {
  PointwisePlan plan;
  std::vector<WantedDerivative>
      derivatives;                       // ascending in wrt; column sums need that of x, which may be stored nowhere
  std::vector<PointwiseTensor> tensors;  // x, grad and the derivatives
  Operands operands;
};

// For the kernel with the derivatives compiled in; plan.vectors is not set where it takes no such problem.
BackwardPlan specialized_backward_plan(PointwiseBackwardProblem const& problem);

// The kernel that runs the problem with its derivatives compiled in; empty where they have to be interpreted, because
// rows are no whole vectors or a reduction gives weights to elements. It depends on the same, and on which derivatives
// are wanted.
std::string specialized_kernel(PointwiseBackwardProblem const& problem);

// Column sums are of the derivative with respect to x, which has to be computed for them even where nobody wants it
// stored.
std::vector<WantedDerivative> derivatives_of(PointwiseBackwardProblem const& problem);

// As the planner takes it.
PointwiseTensor tensor_of(Operand const& operand);
Operand contiguous(void const* data, DType dtype, PointwiseExtents const& extents);
bool is_empty(PointwiseExtents const& extents);

}  // namespace cutfuse
