// The kernels that programs over aligned, contiguous rows are compiled into. No kernel is linked with this file: the
// build compiles it to PTX and embeds the text, which marked_kernel.h reads. Like op_snippets.cu it is compiled with
// -fmad=false.
//
// An asm statement marks where the program goes, as an instruction that no GPU has. It names the registers that nvcc
// has chosen, so that the program becomes part of the kernel's body and nothing is called.
#include "pointwise/kernels.h"
#include "specialize/template_marks.h"

namespace cutfuse {
namespace {

static_assert(kChainVectors == 2, "the marks are of two pieces");

template <int piece, class T>
__device__ __forceinline__ Vector<T> compute(Vector<T> const& input) {
  float values[kVectorSize<T>];
  unpack(input, values);
  mark_compute<piece, kVectorSize<T>>(values);
  Vector<T> result;
  pack(values, result);
  return result;
}

// Where a thread begins, in 32 bits, which pointwise_plan.cpp sees to: a row times a stride of 64 bits is two
// instructions then, and four otherwise. A block is as high as its threads.
struct Start {
  uint32_t outer;
  uint32_t row;
  uint32_t column;
};

template <class T>
__device__ __forceinline__ Start start_of(PointwisePlan const& plan) {
  uint32_t const width = static_cast<uint32_t>(plan.width);
  uint32_t const y = divide_by(threadIdx.x, plan.by_width);
  uint32_t const row_tiles = static_cast<uint32_t>(plan.row_tiles);
  uint32_t const tile = divide_by(blockIdx.x, plan.by_column_tiles);
  uint32_t const outer = plan.extents.outer == 1 ? 0 : tile / row_tiles;
  uint32_t const x = threadIdx.x - y * width;
  return {outer, (tile - outer * row_tiles) * static_cast<uint32_t>(plan.height) + y,
          (blockIdx.x - tile * static_cast<uint32_t>(plan.column_tiles)) * static_cast<uint32_t>(plan.tile_columns) +
              x * kVectorSize<T>};
}

// A thread takes two pieces of one row, without a loop: see kChainVectors. Where the row ends before the second, it
// reads the first again, so that no load waits for a comparison.
template <class T>
__device__ __forceinline__ void run(PointwiseParameters const& parameters) {
  mark_layout<PointwiseParameters, T, kChainVectors>();
  PointwisePlan const& plan = parameters.plan;
  Start const start = start_of<T>(plan);
  uint32_t const rows = static_cast<uint32_t>(plan.extents.rows);
  if (start.row >= rows) return;
  int const columns = static_cast<int>(start.row == rows - 1 ? plan.last_columns : plan.extents.columns);
  int const count = columns - static_cast<int>(start.column);
  if (count <= 0) return;
  VectorPosition const at = {start.outer, start.row, start.column, count};
  bool const has_second = plan.step < count;
  int const second = has_second ? plan.step : 0;
  T const* const input = static_cast<T const*>(parameters.x.data) + offset_at(parameters.x, at);
  Vector<T> const pieces[2] = {load_vector(input), load_vector(input + second)};
  mark_load(at, second);
  T* const out = static_cast<T*>(parameters.out.data) + offset_at(parameters.out, at);
  store_vector(out, compute<0>(pieces[0]));
  if (!has_second) return;
  store_vector(out + plan.step, compute<1>(pieces[1]));
}

}  // namespace
}  // namespace cutfuse

#define CUTFUSE_TEMPLATE(name, T)                                                         \
  extern "C" __global__ void __launch_bounds__(cutfuse::kVectorThreads, 10)               \
      pointwise_##name(__grid_constant__ cutfuse::PointwiseParameters const parameters) { \
    cutfuse::run<T>(parameters);                                                          \
  }

CUTFUSE_TEMPLATE(float32, float)
CUTFUSE_TEMPLATE(float16, __half)
CUTFUSE_TEMPLATE(bfloat16, __nv_bfloat16)
