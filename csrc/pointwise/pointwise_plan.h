// What is asked of the pointwise kernels, how their threads are laid over a tensor, and which launches take a kernel
// with the program compiled in. Host code that knows no CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/division.h"
#include "common/dtype.h"
#include "common/loaded_kernel.h"
#include "epilogue/program.h"
#include "reduce/reductions.h"

namespace cutfuse {

struct PointwiseExtents {
  int64_t outer;
  int64_t rows;
  int64_t columns;
};

// One tensor's strides (outer, row, column) in elements, rewritten in place as dimensions are merged.
using StrideList = std::vector<int64_t*>;

// Merges neighbouring dimensions that every tensor runs through without a break, and moves what is left to the right: a
// contiguous tensor with scalar operands becomes one row.
void collapse(PointwiseExtents& extents, StrideList const& tensors);

// Elements that a thread computes at once, and that its line through the tensor holds.
constexpr int kPointwiseFragment = 8;

// Elements that the vector kernel's interpreter takes at once: what an op costs beside its arithmetic is latency, so a
// wider fragment is faster (six ops, 4096x393216 bf16, H200: 4.1 ms, with 8 elements 5.5 ms).
constexpr int kVectorElements = 16;

// Threads of a block of the backward kernels. Few, because a loop over rows takes registers, of which whole blocks are
// given to a multiprocessor.
constexpr int kBackwardThreads = 128;

struct PointwisePlan {
  PointwiseExtents extents;
  int64_t last_columns;  // of the last row: one long row is folded to many, and the last is shorter
  int64_t tail;          // elements after those, which a second launch computes: they fill no vector
  bool vectors;          // a thread's line lies along columns in groups of 16-byte vectors, which pointwise needs
  bool along_rows;       // single columns, the fragment along rows: coalesced whatever the rows' alignment
  int shift;             // see FragmentLine
  int step;
  int width;             // threads of a block along columns
  int height;            // and along rows
  int64_t tile_columns;  // of a block
  int64_t tile_rows;
  int64_t column_tiles;
  int64_t row_tiles;
  Divisor by_width;         // what plan_pointwise sets, for kernels with a program compiled in
  Divisor by_column_tiles;  // and this
};

// How much of a large tensor a block takes: elements per thread and row, in 16-byte vectors of the first tensor's type.
struct PointwiseBlock {
  int elements;
  int threads;
  int rows;
};

// Collapses `tensors`, which are read or written in whole (the input, the gradient, outputs), and `others` (operands)
// first. `vectors` is set if all tensors allow it: contiguous columns, aligned rows, one dtype.
PointwisePlan plan_pointwise(PointwiseExtents extents, std::vector<Operand>& tensors, StrideList const& others,
                             PointwiseBlock const& block, int multiprocessors);

// The backward kernel's: blocks of at most 256 columns by a number of rows that depends on nothing but the extents, as
// a block's column sums are an output. keep_columns: do not merge or fold columns.
PointwisePlan plan_pointwise_backward(PointwiseExtents extents, std::vector<Operand>& tensors, StrideList const& others,
                                      bool keep_columns);

// The same for the kernels that have the derivatives compiled in: `tensors` are x, the gradient and the outputs, an
// output of fp32 or x's type. Not for them where `vectors` is not set. With keep_columns each column is added up in the
// order of plan_pointwise_backward.
PointwisePlan plan_backward_vectors(PointwiseExtents extents, std::vector<Operand>& tensors, StrideList const& others,
                                    PointwiseBlock const& block, bool keep_columns);

// Rows of column partial sums that pointwise_backward writes.
int64_t pointwise_backward_row_blocks(int64_t rows, int64_t columns);

struct PointwiseProblem {
  PointwiseExtents extents;
  Operand x;  // strides: outer, row, column
  Program program;
  Operands operands;
  void* out;
  DType out_dtype;
  int64_t out_pitch;  // elements between its rows, of which no others lie apart; 0 for a contiguous one
  // Launched where rows are whole vectors: the kernel that specialized_kernel names with this program compiled in. Null
  // for those that interpret it.
  LoadedKernel const* specialized;
};

// A derivative that is wanted: with respect to x (wrt = 0) or operand wrt - 1, each once at most.
struct WantedDerivative {
  int wrt;
  void* data;  // contiguous
  DType dtype;
};

constexpr int kMaxDerivatives = kMaxOperands + 1;

struct PointwiseBackwardProblem {
  PointwiseExtents extents;
  Operand grad;
  Operand x;
  Program program;
  Operands operands;
  int derivative_count;
  WantedDerivative derivatives[kMaxDerivatives];
  // fp32 [row_blocks, columns], or null: sums over a block's rows of the derivative with respect to x. Needs outer
  // == 1.
  float* column_partials;
  // What became of the program's value y after it: nothing, or a reduction over columns, whose gradient is that of
  // reductions.def.
  Reduction reduction;
  float const* row_result;  // fp32 [outer, rows]; where needs_result
  float const* tie_count;   // fp32 [outer, rows]; where counts_ties
  // Computes with accurate primitives whatever the type of x is: the program compares its value with the result of a
  // reduction, whose kernels do. So it is interpreted.
  bool is_accurate;
  // Launched where the problem takes it: the kernel that specialized_kernel names with the program's derivatives
  // compiled in. Null for the one that interprets them, whose results are the same.
  LoadedKernel const* specialized;
};

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
      derivatives;               // ascending in wrt; column sums need that of x, which may be stored nowhere
  std::vector<Operand> tensors;  // x, grad and the derivatives
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
StrideList strides_of(Program const& program, Operands& operands);
Operand contiguous(void const* data, DType dtype, PointwiseExtents const& extents);
Operand result_of(PointwiseProblem const& problem);
bool is_empty(PointwiseExtents const& extents);

}  // namespace cutfuse
