// What is asked of the reduction kernels, which of them runs, how its threads are laid over the tensor, and what
// becomes of the program before a reduction: it is taken out of a sum, or runs in the kernel, where it is interpreted
// or compiled in. Host code that knows no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/division.h"
#include "common/dtype.h"
#include "common/loaded_kernel.h"
#include "epilogue/program.h"
#include "reduce/reductions.h"
#include "specialize/kernel_variant.h"

namespace cutfuse {

struct ReduceExtents {
  int64_t outer;
  int64_t reduced;
  int64_t inner;
};

constexpr bool is_empty(ReduceExtents const& extents) {
  return extents.outer == 0 || extents.reduced == 0 || extents.inner == 0;
}

// What the kernels take into a state at once where a program comes first: elements of a row, and rows of a column. The
// strided kernels have so many columns a thread, where rows are whole vectors.
constexpr int kRowFragment = 16;
constexpr int kColumnFragment = 4;
constexpr int kProgramColumns = 8;

enum class ReducePath {
  kRows,      // the reduced dimension is contiguous: a power of two of threads per row
  kRowTiles,  // short contiguous rows that are not 16-byte aligned: a block of rows through shared memory
  kStrided,   // threads side by side along the inner dimension
  kFolded,    // few rows of fp32, taken for the partial states that they mostly are
};

// The row kernels: `lanes` threads per row; a long row is split among `splits` blocks of `chunk` elements. With a
// program a thread takes kRowFragment elements at a time: where rows are whole aligned vectors, vectors that lie
// `lanes` vectors apart, and elsewhere what row_reduce_program.cu says.
//
// The strided kernel: a thread reads `vector` neighbouring elements of every super-row. A super-row is the fewest rows
// that hold a whole number of vectors (8 rows of 4095 bf16): whatever the alignment of a single row, element j of a
// thread's vector then has the same column in all of them. `period` threads read a super-row. A block is `width`
// threads along it times `height` super-rows; `splits` blocks of `chunk` super-rows share the reduced dimension.
struct ReducePlan {
  ReducePath path;
  int64_t splits;
  int64_t chunk;
  int lanes;
  int tile_rows;
  int vector;
  bool whole_vectors;  // rows begin on a boundary of 16 bytes and hold nothing but a thread's vectors
  int rows_per_super_row;
  int64_t period;
  int width;
  int height;
  int64_t partial_rows;  // partial states per result in the workspace; 0: results are written directly
  Divisor by_width;      // what plan_program sets, for kernels of columns with a program compiled in
  Divisor by_height;
  Divisor by_period;
  Divisor by_tiles;  // blocks of a split
};

// Bytes of workspace that suffice for a tensor of these extents whatever its strides, alignment and program.
size_t reduce_workspace(ReduceExtents const& extents, DType dtype, Reduction reduction, int multiprocessors);

struct ReduceProblem {
  ReduceExtents extents;
  Operand x;  // strides: outer, reduced, inner
  Program program;
  Operands operands;
  Reduction reduction;
  void* out;  // [outer, inner], contiguous
  DType out_dtype;
  float* workspace;  // reduce_workspace bytes
  // Launched where rows are whole vectors: the kernel that specialized_kernel names with this program compiled in. Null
  // for those that interpret it.
  LoadedKernel const* specialized;
  // Of rows that begin at multiples of 16 bytes: the order in which one is reduced is to depend on its length alone.
  bool batch_invariant;
};

// Partial states of a row reduction, fp32 [tiles, rows] (two floats each for logsumexp, one otherwise), to be folded to
// out [rows], times scale.
struct FoldProblem {
  float const* partials;
  int64_t tiles;
  int64_t rows;
  Reduction reduction;
  int64_t count;  // elements that a row's states cover together, which the mean divides by
  void* out;
  DType out_dtype;
  bool batch_invariant;  // the order of a row's states is to depend on their number alone
};

// Neighbouring rows that a block of the fold takes, a power of two.
int fold_width(FoldProblem const& problem);

struct PlannedReduce {
  ReduceProblem problem;  // rows that are neighbours turned to columns; without the program where that only scales
  ReducePlan plan;
  float scale;          // of final results
  float const* weight;  // see ReduceParameters
};

// Of a problem that is not empty.
PlannedReduce plan_program(ReduceProblem const& problem, int multiprocessors);

// The name of the template for tensors of this type.
std::string reduce_template(ReducePath path, DType dtype, Reduction reduction);

// The template of the kernel that runs the problem with its program compiled in; empty where the program has to be
// interpreted, because rows are no whole vectors, there are too many of them or there is nothing to interpret. Whether
// it is empty depends on the program, extents, strides, types and alignments to 16 bytes alone.
std::string specialized_kernel(ReduceProblem const& problem);

// What that kernel has compiled in of the operands. Whatever else a tensor's strides are, only which of them are 0
// counts.
specialize::OperandTypes specialized_operands(ReduceProblem const& problem);

}  // namespace cutfuse
