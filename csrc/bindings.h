// What the binding files share: what Python has in the place of enumerations and structs that have no class there, one
// conversion for each. They alone include pybind11; each registers its functions through one bind_ function.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "epilogue/program.h"
#include "launch/launcher.h"
#include "plan/predictions.h"
#include "reduce/reductions.h"
#include "split/planes.h"

namespace cutfuse::bindings {

namespace py = pybind11;

// Pointers and streams arrive as integers: the core knows no tensor type.
template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline uintptr_t address(void const* data) { return reinterpret_cast<uintptr_t>(data); }

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

inline void check_operand_count(Program const& program, size_t given) {
  if (static_cast<size_t>(program.operand_count) != given) {
    throw py::value_error("the program has " + std::to_string(program.operand_count) + " operands, got " +
                          std::to_string(given));
  }
}

inline Operands to_operands(Program const& program, std::vector<Operand> const& given) {
  check_operand_count(program, given.size());
  Operands operands = {};
  std::copy(given.begin(), given.end(), operands.items);
  return operands;
}

// Operands are strided unless kinds are given.
inline specialize::OperandTypes to_operand_types(Program const& program, std::vector<DType> const& dtypes,
                                                 std::vector<specialize::OperandKind> const& kinds) {
  check_operand_count(program, dtypes.size());
  if (!kinds.empty()) check_operand_count(program, kinds.size());
  specialize::OperandTypes types = {};
  for (size_t k = 0; k < dtypes.size(); ++k) types[k].dtype = dtypes[k];
  for (size_t k = 0; k < kinds.size(); ++k) types[k].kind = kinds[k];
  return types;
}

inline std::vector<specialize::OperandKind> kinds_of(int operand_count, specialize::OperandTypes const& types) {
  std::vector<specialize::OperandKind> kinds(static_cast<size_t>(operand_count));
  for (size_t k = 0; k < kinds.size(); ++k) kinds[k] = types[k].kind;
  return kinds;
}

// None for a program that is interpreted for good.
using OptionalSpecialization = std::optional<specialize::Specialization const*>;

// As many as the plan has kernels that run a program, or none.
void check_epilogues(char const* function, LinearPlan const& plan, SpecializedEpilogues const& epilogues);

void bind_plan(py::module_& module);
void bind_callables(py::module_& module);
void bind_launch(py::module_& module);
void bind_calls(py::module_& module);
void bind_specialize(py::module_& module);
void bind_kernel_text(py::module_& module);
void bind_problems(py::module_& module);

// For each such type: Given is what pybind11 takes from Python, of which `to` makes the value, and `from` gives what is
// made for Python.
template <class Value>
struct Conversion;

template <>
struct Conversion<DType> {
  using Given = int;
  static DType to(int value) {
    if (value >= 0 && value <= static_cast<int>(DType::kBFloat16)) return static_cast<DType>(value);
    throw py::value_error("dtype has to be one of dtypes(), got " + std::to_string(value));
  }
  static int from(DType dtype) { return static_cast<int>(dtype); }
};

template <>
struct Conversion<Reduction> {
  using Given = int;
  static Reduction to(int value) {
    if (value >= 0 && value < kReductionCount) return static_cast<Reduction>(value);
    throw py::value_error("reduction has to be 0 (none) or one of reductions(), got " + std::to_string(value));
  }
  static int from(Reduction reduction) { return static_cast<int>(reduction); }
};

// A struct of three int64_t.
template <class Extents>
struct ExtentsConversion {
  using Given = std::array<int64_t, 3>;
  static Extents to(Given const& given) {
    auto const& [first, second, third] = given;
    if (first >= 0 && second >= 0 && third >= 0) return {first, second, third};
    throw py::value_error("extents have to be at least 0, got (" + std::to_string(first) + ", " +
                          std::to_string(second) + ", " + std::to_string(third) + ")");
  }
  static std::tuple<int64_t, int64_t, int64_t> from(Extents const& extents) {
    auto const& [first, second, third] = extents;
    return {first, second, third};
  }
};

template <>
struct Conversion<PointwiseExtents> : ExtentsConversion<PointwiseExtents> {};
template <>
struct Conversion<ReduceExtents> : ExtentsConversion<ReduceExtents> {};

// A tensor as the kernels see it: address, dtype, and outer, row and column strides in elements.
template <>
struct Conversion<Operand> {
  using Given = std::tuple<uintptr_t, DType, int64_t, int64_t, int64_t>;
  static Operand to(Given const& given) {
    auto const [data, dtype, outer, row, column] = given;
    return {pointer<void const>(data), {outer, row, column}, dtype};
  }
  static Given from(Operand const& operand) {
    auto const& [outer, row, column] = operand.strides;
    return {address(operand.data), operand.dtype, outer, row, column};
  }
};

// wrt, address, dtype.
template <>
struct Conversion<WantedDerivative> {
  using Given = std::tuple<int, uintptr_t, DType>;
  static WantedDerivative to(Given const& given) {
    auto const [wrt, data, dtype] = given;
    return {wrt, pointer<void>(data), dtype};
  }
  static Given from(WantedDerivative const& wanted) { return {wanted.wrt, address(wanted.data), wanted.dtype}; }
};

// Addresses of flags that splitting kernels wrote, and their numbers: of two operands at most.
template <>
struct Conversion<SplitGuard> {
  using Given = std::vector<std::tuple<uintptr_t, int>>;
  static SplitGuard to(Given const& given) {
    SplitGuard guard = {};
    if (given.size() > std::size(guard.flags)) {
      throw py::value_error("a guard has at most two operands' flags, got " + std::to_string(given.size()));
    }
    for (size_t k = 0; k < given.size(); ++k) {
      guard.flags[k] = pointer<uint32_t const>(std::get<0>(given[k]));
      guard.counts[k] = std::get<1>(given[k]);
    }
    return guard;
  }
  static Given from(SplitGuard const& guard) {
    Given found;
    for (size_t k = 0; k < std::size(guard.flags); ++k) {
      if (guard.flags[k] != nullptr) found.emplace_back(address(guard.flags[k]), guard.counts[k]);
    }
    return found;
  }
};

// Address and number of words that are set to zero.
template <>
struct Conversion<ClearedWords> {
  using Given = std::tuple<uintptr_t, int>;
  static ClearedWords to(Given const& given) { return {pointer<int32_t>(std::get<0>(given)), std::get<1>(given)}; }
  static Given from(ClearedWords const& cleared) { return {address(cleared.words), cleared.count}; }
};

// A struct whose fields are given in their order.
template <class Struct, class... Fields>
struct FieldsConversion {
  using Given = std::tuple<Fields...>;
  static Struct to(Given const& given) {
    return std::apply([](auto const&... fields) { return Struct{fields...}; }, given);
  }
};

template <>
struct Conversion<MatrixLayout> : FieldsConversion<MatrixLayout, int64_t, int64_t, int64_t, int64_t, bool> {};
template <>
struct Conversion<VectorLayout> : FieldsConversion<VectorLayout, int64_t, bool> {};
template <>
struct Conversion<DeviceFacts> : FieldsConversion<DeviceFacts, int32_t, int32_t, int32_t> {};
template <>
struct Conversion<TrainedShape> : FieldsConversion<TrainedShape, int64_t, int64_t, int64_t> {};

}  // namespace cutfuse::bindings

namespace pybind11::detail {

template <>
struct type_caster_enum_type_enabled<cutfuse::DType> : std::false_type {};
template <>
struct type_caster_enum_type_enabled<cutfuse::Reduction> : std::false_type {};

template <class Value>
class type_caster<Value, std::void_t<typename cutfuse::bindings::Conversion<Value>::Given>> {
  using Conversion = cutfuse::bindings::Conversion<Value>;
  using Given = typename Conversion::Given;

 public:
  PYBIND11_TYPE_CASTER(Value, make_caster<Given>::name);

  bool load(handle source, bool convert) {
    make_caster<Given> given;
    if (!given.load(source, convert)) return false;
    value = Conversion::to(cast_op<Given>(std::move(given)));
    return true;
  }

  template <class Own>
  static handle cast(Own const& own, return_value_policy policy, handle parent) {
    return make_caster<decltype(Conversion::from(own))>::cast(Conversion::from(own), policy, parent);
  }
};

}  // namespace pybind11::detail
