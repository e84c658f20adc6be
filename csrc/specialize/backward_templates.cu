// The kernels that the derivatives of programs over aligned, contiguous rows are compiled into: as in
// pointwise_templates.cu, with marks where the program goes, compiled to PTX alone and with -fmad=false.
#include "pointwise/kernels.h"
#include "specialize/template_marks.h"

namespace cutfuse {
namespace {

static_assert(kBackwardPieces == 2, "the marks are of two pieces");
static_assert(kMaxDerivatives == 5, "there is a mark of each derivative");

// How many derivatives there are, which the compiler of the text knows then.
__device__ __forceinline__ int mark_count() {
  int count;
  asm volatile("cutfuse.count %0;" : "=r"(count));
  return count;
}

// As mark_load, for a second piece so many rows below.
__device__ __forceinline__ void mark_load_rows(VectorPosition const& at, int second) {
  asm volatile("cutfuse.load_rows %0, %1, %2, {0, %3};" ::"l"(at.outer), "l"(at.row), "l"(at.column), "r"(second));
}

// Has a piece differentiated, whose input is given.
template <int piece>
__device__ __forceinline__ void mark_differentiate(float const (&x)[4]) {
  asm volatile("cutfuse.differentiate %4, {%0, %1, %2, %3};" ::"f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "n"(piece));
}

template <int piece>
__device__ __forceinline__ void mark_differentiate(float const (&x)[8]) {
  asm volatile("cutfuse.differentiate %8, {%0, %1, %2, %3, %4, %5, %6, %7};" ::"f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]), "n"(piece));
}

// A derivative of another type than x is in fp32: plan_backward_vectors has seen to it.
template <class T>
__device__ __forceinline__ void store_output(Output const& output, int64_t offset, float const* values) {
  constexpr int kSize = kVectorSize<T>;
  if constexpr (!std::is_same_v<T, float>) {
    if (output.dtype == DType::kFloat32) {
      CUTFUSE_UNROLL
      for (int first = 0; first < kSize; first += kVectorSize<float>) {
        Vector<float> packed;
        pack(values + first, packed);
        store_vector(static_cast<float*>(output.data) + offset + first, packed);
      }
      return;
    }
  }
  Vector<T> packed;
  pack(values, packed);
  store_vector(static_cast<T*>(output.data) + offset, packed);
}

// One derivative of a piece, and those after it. `sums`: of the first one, or null.
template <int w, class T>
__device__ __forceinline__ void store_derivatives(PointwiseBackwardParameters const& parameters, int count,
                                                  VectorPosition const& at, bool stores, Vector<T> const& gradients,
                                                  float* sums) {
  if constexpr (w < kMaxDerivatives) {
    if (w >= count) return;
    Output const& output = parameters.outputs[w];
    float values[kVectorSize<T>];
    unpack(gradients, values);
    mark_derivative<w, kVectorSize<T>>(values);
    if (stores) {
      if (output.data != nullptr) store_output<T>(output, offset_at(output, at), values);
      if (w == 0 && sums != nullptr) {
        CUTFUSE_UNROLL
        for (int i = 0; i < kVectorSize<T>; ++i) sums[i] += values[i];
      }
    }
    store_derivatives<w + 1>(parameters, count, at, stores, gradients, sums);
  }
}

template <int piece, class T>
__device__ __forceinline__ void differentiate(PointwiseBackwardParameters const& parameters, VectorPosition const& at,
                                              bool stores, Vector<T> const& x, Vector<T> const& gradients,
                                              float* sums) {
  float values[kVectorSize<T>];
  unpack(x, values);
  mark_differentiate<piece>(values);
  store_derivatives<0>(parameters, mark_count(), at, stores, gradients, sums);
}

template <class T>
__device__ __forceinline__ T const* first_of(Operand const& tensor, VectorPosition const& at) {
  return static_cast<T const*>(tensor.data) + offset_at(tensor, at);
}

// A thread takes two pieces of one row, as in pointwise_templates.cu.
template <class T>
__device__ __forceinline__ void run(PointwiseBackwardParameters const& parameters) {
  mark_layout<PointwiseBackwardParameters, T, kBackwardPieces>();
  PointwisePlan const& plan = parameters.plan;
  PointwisePosition const start = pointwise_position(plan);
  if (start.row >= start.row_end) return;
  int const count = columns_left(plan, start.row, start.column);
  if (count <= 0) return;
  VectorPosition const at = {start.outer, start.row, start.column, count};
  bool const has_second = plan.step < count;
  int const second = has_second ? plan.step : 0;
  T const* const x = first_of<T>(parameters.x, at);
  T const* const grad = first_of<T>(parameters.grad, at);
  Vector<T> const inputs[2] = {load_vector(x), load_vector(x + second)};
  Vector<T> const gradients[2] = {load_vector(grad), load_vector(grad + second)};
  mark_load(at, second);
  differentiate<0>(parameters, at, true, inputs[0], gradients[0], nullptr);
  VectorPosition const next = {at.outer, at.row, at.column + second, count};
  differentiate<1>(parameters, next, has_second, inputs[1], gradients[1], nullptr);
}

// Adds the block's threads above each other, one after the other, as the interpreting kernel does.
template <class T>
__device__ __forceinline__ void store_column_sums(PointwiseBackwardParameters const& parameters, float const* sums) {
  constexpr int kSize = kVectorSize<T>;
  __shared__ float storage[kBackwardThreads * kSize];
  PointwisePlan const& plan = parameters.plan;
  int const columns = plan.width * kSize;
  CUTFUSE_UNROLL
  for (int i = 0; i < kSize; ++i) storage[static_cast<int>(threadIdx.x) * kSize + i] = sums[i];
  __syncthreads();
  uint32_t const row_block = divide(blockIdx.x, static_cast<uint32_t>(plan.column_tiles));
  int64_t const first = (blockIdx.x - row_block * plan.column_tiles) * plan.tile_columns;
  CUTFUSE_NO_UNROLL
  for (int column = static_cast<int>(threadIdx.x); column < columns; column += static_cast<int>(blockDim.x)) {
    if (first + column >= plan.extents.columns) return;
    float total = storage[column];
    CUTFUSE_NO_UNROLL
    for (int row = 1; row < plan.height; ++row) total += storage[row * columns + column];
    parameters.column_partials[row_block * plan.extents.columns + first + column] = total;
  }
}

// The rows of a block, in each thread two at a time.
template <class T>
__device__ __forceinline__ void run_columns(PointwiseBackwardParameters const& parameters) {
  mark_layout<PointwiseBackwardParameters, T, kBackwardPieces>();
  PointwisePlan const& plan = parameters.plan;
  PointwisePosition const start = pointwise_position(plan);
  float sums[kVectorSize<T>] = {};
  VectorPosition at = {start.outer, start.row, start.column, 0};
  T const* x = first_of<T>(parameters.x, at);
  T const* grad = first_of<T>(parameters.grad, at);
  if (start.column < plan.extents.columns) {
    CUTFUSE_NO_UNROLL
    for (; at.row < start.row_end; at.row += 2 * plan.height) {
      bool const has_second = at.row + plan.height < start.row_end;
      int const second = has_second ? plan.height : 0;
      Vector<T> const inputs[2] = {load_vector(x), load_vector(x + second * parameters.x.strides[1])};
      Vector<T> const gradients[2] = {load_vector(grad), load_vector(grad + second * parameters.grad.strides[1])};
      mark_load_rows(at, second);
      differentiate<0>(parameters, at, true, inputs[0], gradients[0], sums);
      VectorPosition const next = {at.outer, at.row + second, at.column, 0};
      differentiate<1>(parameters, next, has_second, inputs[1], gradients[1], sums);
      x += 2 * plan.height * parameters.x.strides[1];
      grad += 2 * plan.height * parameters.grad.strides[1];
    }
  }
  store_column_sums<T>(parameters, sums);
}

}  // namespace
}  // namespace cutfuse

#define CUTFUSE_TEMPLATE(name, T)                                                                                  \
  extern "C" __global__ void __launch_bounds__(cutfuse::kVectorThreads, 10)                                        \
      pointwise_backward_##name(__grid_constant__ cutfuse::PointwiseBackwardParameters const parameters) {         \
    cutfuse::run<T>(parameters);                                                                                   \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(cutfuse::kBackwardThreads, 10)                                      \
      pointwise_backward_columns_##name(__grid_constant__ cutfuse::PointwiseBackwardParameters const parameters) { \
    cutfuse::run_columns<T>(parameters);                                                                           \
  }

CUTFUSE_TEMPLATE(float32, float)
CUTFUSE_TEMPLATE(float16, __half)
CUTFUSE_TEMPLATE(bfloat16, __nv_bfloat16)
