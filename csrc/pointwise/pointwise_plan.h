// How the threads of the pointwise kernels are laid over a tensor: host code that knows no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "common/divisor.h"
#include "common/dtype.h"

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

// What the choice depends on for each tensor that is read or written in whole: the input, the gradient, outputs.
struct PointwiseTensor {
  int64_t strides[3];
  DType dtype;
  uintptr_t address;
};

// How much of a large tensor a block takes: elements per thread and row, in 16-byte vectors of the first tensor's type.
struct PointwiseBlock {
  int elements;
  int threads;
  int rows;
};

// Collapses `tensors` and `others` (operands) first. `vectors` is set if all tensors allow it: contiguous columns,
// aligned rows, one dtype.
PointwisePlan plan_pointwise(PointwiseExtents extents, std::vector<PointwiseTensor>& tensors, StrideList const& others,
                             PointwiseBlock const& block, int multiprocessors);

// The backward kernel's: blocks of at most 256 columns by a number of rows that depends on nothing but the extents, as
// a block's column sums are an output. keep_columns: do not merge or fold columns.
PointwisePlan plan_pointwise_backward(PointwiseExtents extents, std::vector<PointwiseTensor>& tensors,
                                      StrideList const& others, bool keep_columns);

// The same for the kernels that have the derivatives compiled in: `tensors` are x, the gradient and the outputs, an
// output of fp32 or x's type. Not for them where `vectors` is not set. With keep_columns each column is added up in the
// order of plan_pointwise_backward.
PointwisePlan plan_backward_vectors(PointwiseExtents extents, std::vector<PointwiseTensor>& tensors,
                                    StrideList const& others, PointwiseBlock const& block, bool keep_columns);

// Rows of column partial sums that pointwise_backward writes.
int64_t pointwise_backward_row_blocks(int64_t rows, int64_t columns);

}  // namespace cutfuse
