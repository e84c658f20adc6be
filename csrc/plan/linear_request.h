// What the plan of a linear layer depends on: y = reduce(program(x @ weight^T + bias, operands)), and no pointer.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/dtype.h"
#include "reduce/reduction.h"
#include "split/planes.h"

namespace cutfuse {

// How fp32 matrices are multiplied; 16-bit ones are multiplied in one way.
enum class Precision : int32_t {
  kIeee,     // by cuBLAS in fp32
  kTf32,     // rounded to tf32
  kSplit3,   // as planes of 16-bit parts, see split/planes.h
  kSplit6,   // as more of them
  kGuarded,  // by split3 where the operands' range allows it, and by split6 elsewhere; or in fp32 where that is faster
};

constexpr int kPrecisionCount = 5;

constexpr char const* name_of(Precision precision) {
  constexpr char const* names[kPrecisionCount] = {"ieee", "tf32", "split3", "split6", "guarded"};
  return names[static_cast<int>(precision)];
}

// What of a weight is split as a rule; guarded products take split6 for the rest.
constexpr SplitScheme first_scheme(Precision precision) {
  return precision == Precision::kSplit6 ? SplitScheme::kSplit6 : SplitScheme::kSplit3;
}

// What issues the launches. It decides what they take of the host, and what the pass behind cuBLAS's product is: a
// kernel that interprets the program, or one that torch.compile's compiler makes for it.
enum class Issuer : int32_t {
  kCall,          // of a public function
  kTraining,      // of a training step for whose launches the device waits
  kCompiledCode,  // of torch.compile's compiler
  kCompiledCpp,   // of the same in C++, which calls operators through PyTorch's dispatcher
  kGraph,         // of CUDA, which holds the launches of such code
};

// Strides are in elements. aligned: the first element lies at a multiple of kOperandAlignment bytes.
struct MatrixLayout {
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride;
  bool aligned;
};

struct VectorLayout {
  int64_t stride;
  bool aligned;
};

// The tensor memory accelerator's.
constexpr int64_t kOperandAlignment = 16;

// Of a CUDA device; all of another one's are 0.
struct DeviceFacts {
  int32_t major;  // of its compute capability
  int32_t minor;
  int32_t multiprocessors;
};

struct LinearRequest {
  MatrixLayout x;       // [M, K]
  MatrixLayout weight;  // [N, K]
  // The rows of each of several weights in memory of their own, whose products lie side by side in y and which are
  // `weight` together; empty for one. Each has a bias of its own, or none.
  std::vector<int64_t> joined_rows;
  std::optional<VectorLayout> bias;  // [N]
  DType input;                       // of x, weight and bias
  DType output;
  Reduction reduction;  // over N; kNone gives the matrix
  float epilogue_cost;  // see cost_of(Program); 0 for no epilogue
  // See specialized_cost_of(Program), where fused kernels have it compiled in, or will as soon as it is. Empty where
  // they interpret it for good.
  std::optional<float> specialized_cost;
  float generated_cost;  // see generated_cost_of(Program)
  float operand_bytes;   // that it reads for each element of [M, N]: of operands that are matrices of that size
  float fetched_bytes;   // of these: of a matrix that a kernel's copy engine may bring (fetches_operand)
  Precision precision;
  bool weight_has_planes;  // those of first_scheme(precision) are in memory of their own already
  // z = x @ weight^T + bias is a second result, of the input's type: a backward pass differentiates the program there.
  bool stores_pre_activation;
  DeviceFacts device;
  Issuer issuer;

  bool joins_weights() const { return !joined_rows.empty(); }

  // What the epilogue takes in a fused kernel.
  float fused_cost() const { return specialized_cost.value_or(epilogue_cost); }
};

}  // namespace cutfuse
