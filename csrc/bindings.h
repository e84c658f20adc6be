// What the binding files share. They alone include pybind11; each registers its functions through one bind_ function.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/dtype.h"
#include "epilogue/program.h"
#include "launch/launcher.h"
#include "reduce/reductions.h"
#include "split/planes.h"

namespace cutfuse::bindings {

namespace py = pybind11;

// Pointers and streams arrive as integers: the core knows no tensor type.
template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline DType to_dtype(int value) {
  if (value < 0 || value > static_cast<int>(DType::kBFloat16)) {
    throw py::value_error("dtype has to be one of dtypes(), got " + std::to_string(value));
  }
  return static_cast<DType>(value);
}

inline Reduction to_reduction(int value) {
  if (value < 0 || value >= kReductionCount) {
    throw py::value_error("reduction has to be 0 (none) or one of reductions(), got " + std::to_string(value));
  }
  return static_cast<Reduction>(value);
}

inline SplitScheme to_scheme(int value) {
  if (value != static_cast<int>(SplitScheme::kSplit3) && value != static_cast<int>(SplitScheme::kSplit6)) {
    throw py::value_error("scheme has to be 3 or 6, got " + std::to_string(value));
  }
  return static_cast<SplitScheme>(value);
}

inline std::string pair_of(int64_t rows, int64_t columns) {
  return "(" + std::to_string(rows) + ", " + std::to_string(columns) + ")";
}

inline void check_shape(char const* function, int64_t rows, int64_t columns) {
  if (rows < 0 || columns < 0) {
    throw py::value_error(std::string(function) + ": rows and columns have to be at least 0, got " +
                          pair_of(rows, columns));
  }
}

using Extents = std::array<int64_t, 3>;

inline std::string to_string(Extents const& extents) {
  return "(" + std::to_string(extents[0]) + ", " + std::to_string(extents[1]) + ", " + std::to_string(extents[2]) + ")";
}

inline bool is_empty(Extents const& extents) { return extents[0] == 0 || extents[1] == 0 || extents[2] == 0; }

inline void check_extents(char const* kernel, Extents const& extents) {
  for (int64_t const extent : extents) {
    if (extent < 0) {
      throw py::value_error(std::string(kernel) + ": extents have to be at least 0, got " + to_string(extents));
    }
  }
}

inline void check_operand_count(Program const& program, size_t given) {
  if (static_cast<size_t>(program.operand_count) != given) {
    throw py::value_error("the program has " + std::to_string(program.operand_count) + " operands, got " +
                          std::to_string(given));
  }
}

// A tensor as the kernels see it: pointer, dtype, and outer, row and column strides in elements.
using MatrixTuple = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t>;

inline Operand to_operand(MatrixTuple const& matrix) {
  auto const [address, dtype, outer, row, column] = matrix;
  return {pointer<void const>(address), {outer, row, column}, to_dtype(dtype)};
}

inline Operands to_operands(Program const& program, std::vector<MatrixTuple> const& matrices) {
  check_operand_count(program, matrices.size());
  Operands operands = {};
  for (size_t k = 0; k < matrices.size(); ++k) {
    operands.items[k] = to_operand(matrices[k]);
  }
  return operands;
}

// Operands are strided unless kinds are given.
inline specialize::OperandTypes to_operand_types(Program const& program, std::vector<int> const& dtypes,
                                                 std::vector<specialize::OperandKind> const& kinds) {
  check_operand_count(program, dtypes.size());
  if (!kinds.empty()) check_operand_count(program, kinds.size());
  specialize::OperandTypes types = {};
  for (size_t k = 0; k < dtypes.size(); ++k) types[k].dtype = to_dtype(dtypes[k]);
  for (size_t k = 0; k < kinds.size(); ++k) types[k].kind = kinds[k];
  return types;
}

inline std::vector<specialize::OperandKind> kinds_of(int operand_count, specialize::OperandTypes const& types) {
  std::vector<specialize::OperandKind> kinds(static_cast<size_t>(operand_count));
  for (size_t k = 0; k < kinds.size(); ++k) kinds[k] = types[k].kind;
  return kinds;
}

// Addresses of flags that splitting kernels wrote, and their numbers: of two operands at most.
using FlagsTuple = std::tuple<uintptr_t, int>;

inline SplitGuard to_guard(std::vector<FlagsTuple> const& flags) {
  SplitGuard guard = {};
  if (flags.size() > std::size(guard.flags)) {
    throw py::value_error("a guard has at most two operands' flags, got " + std::to_string(flags.size()));
  }
  for (size_t k = 0; k < flags.size(); ++k) {
    guard.flags[k] = pointer<uint32_t const>(std::get<0>(flags[k]));
    guard.counts[k] = std::get<1>(flags[k]);
  }
  return guard;
}

// None for a program that is interpreted for good.
using OptionalSpecialization = std::optional<specialize::Specialization const*>;

// As many as the plan has fused products, or none.
void check_epilogues(char const* function, LinearPlan const& plan, SpecializedEpilogues const& epilogues);

// A call of pointwise, without a specialization.
PointwiseProblem to_problem(Program const& program, Extents const& extents, MatrixTuple const& x,
                            std::vector<MatrixTuple> const& operands, uintptr_t out, int out_dtype);

using DerivativeTuple = std::tuple<int, uintptr_t, int>;  // wrt, pointer, dtype

// A call of pointwise_backward, without column sums, a reduction and a specialization.
PointwiseBackwardProblem to_backward_problem(Program const& program, Extents const& extents, MatrixTuple const& grad,
                                             MatrixTuple const& x, std::vector<MatrixTuple> const& operands,
                                             std::vector<DerivativeTuple> const& outputs);

// A call of reduce, without a specialization.
ReduceProblem to_problem(Program const& program, Extents const& extents, MatrixTuple const& x,
                         std::vector<MatrixTuple> const& operands, int reduction, uintptr_t out, int out_dtype,
                         uintptr_t workspace);

void bind_plan(py::module_& module);
void bind_callables(py::module_& module);
void bind_launch(py::module_& module);
void bind_calls(py::module_& module);
void bind_specialize(py::module_& module);
void bind_kernel_text(py::module_& module);
void bind_split(py::module_& module);
void bind_pointwise(py::module_& module);
void bind_reduce(py::module_& module);

}  // namespace cutfuse::bindings
