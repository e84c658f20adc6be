// What tells specialized kernels of one template apart: the types of their operands' elements, and how they lie; what
// they are called, where that is more than the name of the template; and what of a program is compiled in.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"
#include "common/loaded_kernel.h"
#include "epilogue/program.h"
#include "reduce/reductions.h"

namespace cutfuse::specialize {

// Of an operand of a GEMM's epilogue, and of a reduction, where a thread walks along a line of pieces. Others are
// always kStrided.
enum class OperandKind : uint8_t {
  kStrided,  // loaded by its strides, whatever they are
  kScalar,   // one element; of a line one for all of it
  kRow,      // one contiguous row; of a line the same piece throughout, whatever the strides
  kColumn,   // one element for each row; of a line one for each piece
  kSource,   // a matrix that the kernel's copy engine brings ahead of its use: see sm90::SourceFragment
};

struct OperandType {
  DType dtype = DType::kFloat32;
  OperandKind kind = OperandKind::kStrided;

  constexpr bool operator==(OperandType const& other) const { return dtype == other.dtype && kind == other.kind; }
};

using OperandTypes = std::array<OperandType, kMaxOperands>;

// The operand that is the source; -1 for none.
constexpr int source_among(OperandTypes const& types) {
  for (int k = 0; k < kMaxOperands; ++k) {
    if (types[k].kind == OperandKind::kSource) return k;
  }
  return -1;
}

// What a GEMM kernel stages of operands of these types, if it stages any.
constexpr StagedOperands staged_among(OperandTypes const& types) {
  StagedOperands staged = {source_among(types), 0, 0};
  for (int k = 0; k < kMaxOperands; ++k) {
    uint8_t const bit = static_cast<uint8_t>(1 << k);
    if (types[k].kind == OperandKind::kRow) staged.rows |= bit;
    if (types[k].kind == OperandKind::kScalar || types[k].kind == OperandKind::kColumn) staged.columns |= bit;
  }
  return staged;
}

// A thread's fragment of n elements (sm90_epilogue_function.h) has fewer different ones of some kinds: how many, and
// which of them its element i is.
constexpr int distinct_elements(OperandKind kind, int n) {
  constexpr int kRows = 2;
  if (kind == OperandKind::kScalar) return 1;
  if (kind == OperandKind::kColumn) return kRows;
  return kind == OperandKind::kRow ? n / kRows : n;
}

constexpr int distinct_element(OperandKind kind, int i) {
  if (kind == OperandKind::kScalar) return 0;
  if (kind == OperandKind::kColumn) return i >> 1 & 1;
  return kind == OperandKind::kRow ? (i >> 2) * 2 + (i & 1) : i;
}

// The inputs that a program is differentiated with respect to, ascending: 0 for x, k for operand k - 1. Empty where its
// value is asked for.
using Inputs = std::vector<int>;

// What of a GEMM kernel is known of every launch.
struct GemmVariant {
  bool stores_pre_activation = true;       // whether a launch may ask for it
  Reduction reduction = Reduction::kNone;  // that a kernel which reduces rows computes; none: any of them
};

struct KernelName {
  std::string_view kernel_template;
  Inputs wrt;
  GemmVariant variant;
};

// "pointwise_backward_bfloat16_d02" is the kernel of that template with the derivatives of inputs 0 and 2.
std::string derivative_kernel(std::string_view kernel_template, Inputs const& wrt);
// "sm90_bf16_128x128x64_2x1_pingpong_z" is the kernel of that template that stores the pre-activation z, and
// "sm90_bf16_rows_64x128x64_1x1_pingpong_sum" the one that computes sums and means.
std::string variant_kernel(std::string_view kernel_template, GemmVariant const& variant);
KernelName read_kernel_name(std::string_view kernel);

// Bytes that are equal for complete programs which the same compiled code runs.
std::string structure_of(Program const& program, OperandTypes const& types);

}  // namespace cutfuse::specialize
