#include "plan/operand_layouts.h"

#include <numeric>

namespace cutfuse {

namespace {

bool has_contiguous_rows(MatrixLayout const& matrix) { return matrix.column_stride == 1 || matrix.columns == 1; }

// Columns that overlap, as those of an expanded vector do, are left to PyTorch.
bool has_contiguous_columns(MatrixLayout const& matrix) {
  return (matrix.row_stride == 1 || matrix.rows == 1) && matrix.column_stride >= matrix.rows;
}

bool has_contiguous_lines(MatrixLayout const& matrix) {
  return has_contiguous_rows(matrix) || has_contiguous_columns(matrix);
}

// By rows where the strides allow both, because more kernels read rows.
ProductLayout layout_for(MatrixLayout const& x, MatrixLayout const& weight) {
  if (!has_contiguous_rows(x)) return ProductLayout::kTN;
  return has_contiguous_rows(weight) ? ProductLayout::kNT : ProductLayout::kNN;
}

// Elements between the lines that are read.
int64_t pitch_of(MatrixLayout const& matrix, bool by_columns) {
  if (by_columns) return matrix.columns > 1 ? matrix.column_stride : matrix.rows;
  return matrix.rows > 1 ? matrix.row_stride : matrix.columns;
}

}  // namespace

std::string strides_of(MatrixLayout const& matrix) {
  return "(" + std::to_string(matrix.row_stride) + ", " + std::to_string(matrix.column_stride) + ")";
}

std::string why_lines_are_not_read(LinearRequest const& request) {
  if (!has_contiguous_lines(request.x)) {
    return "x has strides " + strides_of(request.x) + ": neither its rows nor its columns are contiguous";
  }
  if (!has_contiguous_lines(request.weight)) {
    return "weight has strides " + strides_of(request.weight) + ": neither its rows nor its columns are contiguous";
  }
  if (!has_contiguous_rows(request.x) && !has_contiguous_columns(request.weight)) {
    return "x has strides " + strides_of(request.x) + " and weight " + strides_of(request.weight) +
           ": kernels that read x by columns read the weight by columns too";
  }
  return {};
}

GemmProblem problem_of(LinearRequest const& request, Product product) {
  ProductLayout const layout = layout_for(request.x, request.weight);
  return {
      request.x.rows,
      request.weight.rows,
      request.x.columns,
      pitch_of(request.x, reads_columns_of_x(layout)),
      pitch_of(request.weight, reads_columns_of_weight(layout)),
      request.input,
      request.output,
      request.reduction,
      request.device.multiprocessors,
      request.fused_cost(),
      product,
      request.specialized_cost.has_value(),
      request.stores_pre_activation,
      layout,
      std::accumulate(request.joined_rows.begin(), request.joined_rows.end(), int64_t{0}, std::gcd<int64_t, int64_t>)};
}

}  // namespace cutfuse
