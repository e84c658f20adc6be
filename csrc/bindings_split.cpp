// The splitting kernels' share of cutfuse._C.
#include <optional>

#include "bindings.h"
#include "launch/launcher.h"

namespace cutfuse::bindings {
namespace {

// Address and number of words that are set to zero.
using ClearedTuple = std::tuple<uintptr_t, int>;

void check_cleared(ClearedTuple const& cleared, int64_t rows, int64_t columns) {
  auto const [address, count] = cleared;
  if (count == 0 || (count > 0 && address != 0 && rows > 0 && columns > 0)) return;
  throw py::value_error("split: words to clear have to have an address, and the matrix elements, got " +
                        std::to_string(count) + " words at " + std::to_string(address) + " for " +
                        pair_of(rows, columns));
}

void split(uintptr_t stream, int scheme, bool is_weight, uintptr_t source, int64_t rows, int64_t columns,
           int64_t row_stride, int64_t column_stride, uintptr_t values, uintptr_t scales, uintptr_t flags,
           std::optional<std::vector<FlagsTuple>> const& guard, ClearedTuple const& cleared) {
  check_shape("split", rows, columns);
  check_cleared(cleared, rows, columns);
  SplitProblem problem = {};
  problem.source = pointer<float const>(source);
  problem.rows = rows;
  problem.columns = columns;
  problem.row_stride = row_stride;
  problem.column_stride = column_stride;
  problem.scheme = to_scheme(scheme);
  problem.is_weight = is_weight;
  problem.planes = {pointer<void>(values), pointer<float>(scales), pointer<uint32_t>(flags)};
  problem.cleared = {pointer<int32_t>(std::get<0>(cleared)), std::get<1>(cleared)};
  problem.guarded = guard.has_value();
  if (guard) problem.only_if = to_guard(*guard);
  if (rows > 0 && columns > 0 && (source == 0 || values == 0 || scales == 0 || flags == 0)) {
    throw py::value_error("split: source, values, scales and flags must not be null pointers for " +
                          pair_of(rows, columns));
  }
  launcher().split(problem, pointer<void>(stream));
}

}  // namespace

void bind_split(py::module_& module) {
  module.def("split", &split, py::arg("stream"), py::arg("scheme"), py::arg("is_weight"), py::arg("source"),
             py::arg("rows"), py::arg("columns"), py::arg("row_stride"), py::arg("column_stride"), py::arg("values"),
             py::arg("scales"), py::arg("flags"), py::arg("guard") = py::none(),
             py::arg("cleared") = ClearedTuple(0, 0),
             "Splits an fp32 matrix to planes, which are 128-byte aligned. guard: None, or at most two (flags, count) "
             "of split3's planes: nothing is written unless a flag says that it would lose accuracy. cleared: address "
             "and number of words that are set to zero.");
}

}  // namespace cutfuse::bindings
