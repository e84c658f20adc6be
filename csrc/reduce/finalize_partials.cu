// Folds partial states [tiles, rows] to results [rows]. A block takes a few neighbouring rows, which makes its loads
// coalesced, and spreads their tiles over its threads, which keeps the chain of dependent loads short. Every fold has a
// fixed order, so that two runs agree bit for bit.
#include "common/launch.h"
#include "common/vector_access.h"
#include "reduce/combine.h"
#include "reduce/kernels.h"

namespace cutfuse {
namespace {

constexpr int kUnroll = 8;

struct FinalizeParameters {
  float const* partials;
  int64_t tiles;
  int64_t rows;
  int64_t count;
  float scale;
  void* out;
  Reduction reduction;
  DType out_dtype;
  int32_t width;  // neighbouring rows of a block, a power of two
};

template <Reduction reduction>
__global__ void __launch_bounds__(kBlockThreads)
    finalize_partials(__grid_constant__ FinalizeParameters const parameters) {
  __shared__ RowState storage[kBlockThreads];
  begin_behind_previous_kernel();
  int const thread = static_cast<int>(threadIdx.x);
  int const width = parameters.width;
  int const height = kBlockThreads / width;
  int64_t const row = blockIdx.x * static_cast<int64_t>(width) + thread % width;
  bool const active = row < parameters.rows;
  using Fold = FoldOf<reduction>;
  constexpr RowState kInitial = {Fold::kIdentity, 0.0f};
  RowState state = kInitial;
  CUTFUSE_NO_UNROLL
  for (int64_t first = thread / width; active && first < parameters.tiles; first += height * kUnroll) {
    RowState loaded[kUnroll];
    CUTFUSE_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      int64_t const tile = first + u * height;
      loaded[u] = kInitial;
      if (tile < parameters.tiles) loaded[u] = Fold::load(parameters.partials, tile * parameters.rows + row);
    }
    CUTFUSE_UNROLL
    for (int u = 0; u < kUnroll; ++u) state = Fold::combine(state, loaded[u]);
  }
  for (int half = kBlockThreads / 2; half >= width; half /= 2) {
    storage[thread] = state;
    __syncthreads();
    if (thread < half) state = Fold::combine(state, storage[thread + half]);
    __syncthreads();
  }
  if (active && thread < width) {
    float const result = finish_any(parameters.reduction, state, static_cast<float>(parameters.count));
    store_element(parameters.out, parameters.out_dtype, row, result * parameters.scale);
  }
}

}  // namespace

cudaError_t finalize_row_partials(FoldProblem const& problem, float scale, cudaStream_t stream) {
  int const width = fold_width(problem);
  FinalizeParameters const parameters = {problem.partials, problem.tiles,     problem.rows,      problem.count, scale,
                                         problem.out,      problem.reduction, problem.out_dtype, width};
  return dispatch_fold(problem.reduction, [&](auto constant) {
    return launch(finalize_partials<decltype(constant)::value>, ceil_divide(problem.rows, width), kBlockThreads, stream,
                  parameters);
  });
}

}  // namespace cutfuse
