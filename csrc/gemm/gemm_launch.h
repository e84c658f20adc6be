// A launch of a GEMM kernel: the problem and where everything lies. Host code that knows no CUDA.
#pragma once

#include <cstdint>

#include "common/loaded_kernel.h"
#include "epilogue/program.h"
#include "plan/gemm_configs.h"
#include "split/planes.h"

namespace cutfuse {

// A product over planes may slice K, so that a few tiles keep all multiprocessors busy. The blocks of a tile's slices
// leave their sums, and the last to arrive adds them in the order of the slices.
struct KSlices {
  int32_t count;     // 1: K is not sliced, and no memory needed
  float* sums;       // [tiles, count, elements of a tile]
  int32_t* arrived;  // [tiles]; zero at first: the pass that splits a clears them
};

// Weights that one kernel multiplies by, side by side in its result: as many columns of it as each has rows.
constexpr int kMostJoinedWeights = 3;

struct JoinedWeight {
  void const* weight;  // [columns, K]; the pitch is that of all
  void const* bias;    // null for none
  int64_t columns;
};

struct JoinedWeights {
  JoinedWeight items[kMostJoinedWeights];
  int32_t count;  // 0 of a kernel with one weight
};

struct GemmBuffers {
  void const* a;  // null where planes are multiplied
  void const* b;
  void const* bias;      // null for none
  void* d;               // [M,N] contiguous; unused by a row reduction
  float* partials;       // [N tiles, M] states of partial_width(reduction) floats; unused by a store
  void* pre_activation;  // [M,N] contiguous, of the operands' type; null where it is not stored
  Planes planes_a;       // of a product over planes, whose k and pitches are those of the planes
  Planes planes_b;
  ConvertedOperand converted_b;
  KSlices slices;
  SplitGuard guard;
  SplitRun run;
  JoinedWeights joined;  // of which b is the first; in place of bias
};

struct GemmLaunch {
  GemmProblem problem;
  GemmBuffers buffers;
  Program program;
  Operands operands;
  int swizzle;          // tiles along one dimension that are kept together for the L2
  bool raster_along_m;  // which dimension the tile scheduler walks first
  // Launched in the kernel's place: the same kernel with this program compiled in. Null for the one that interprets it.
  LoadedKernel* specialized;
};

}  // namespace cutfuse
