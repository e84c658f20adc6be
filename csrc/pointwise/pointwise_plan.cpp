#include "pointwise/pointwise_plan.h"

#include <algorithm>
#include <utility>

#include "common/division.h"
#include "specialize/kernel_variant.h"

namespace cutfuse {

namespace {

constexpr int kLineVector = 4;          // neighbours of a fragment that are loaded together where alignment allows it
constexpr int64_t kBlocksInFlight = 8;  // per multiprocessor: below, more blocks are worth more than more rows each
constexpr int64_t kWorthTwoLaunches = 1 << 20;  // elements: what the vector kernel saves is worth a second launch
constexpr int64_t kBackwardColumns = 256;       // of a block
// Wanted: a few waves, so that the last ones end together. 3152x3072 in bf16 with rows of 16 at least takes 26.3 us,
// with 32 at least 29.5, 16384x4096 in one wave 137 and in several 113 (H200).
constexpr int64_t kBackwardBlocks = 2640;
constexpr int64_t kBackwardRows = 16;             // of a block, at least
constexpr int64_t kMostBackwardRowBlocks = 1024;  // whose partial sums few columns' blocks have to fold

constexpr uint32_t kLargest = (uint32_t{1} << 31) - 1;  // that is divided, and divides

// The quotients of the largest number, and where one goes up.
constexpr bool divides(uint32_t divisor) {
  Divisor const by = divisor_of(divisor);
  uint32_t const last = kLargest / divisor;
  return divide_by(kLargest, by) == last && divide_by(last * divisor, by) == last &&
         divide_by(last * divisor - 1, by) == last - 1;
}

static_assert(divides(1) && divides(2) && divides(3) && divides(4) && divides(7) && divides(641) && divides(65535) &&
              divides(65537) && divides((1u << 30) + 1) && divides(kLargest));

int vector_shift(DType dtype) { return size_of(dtype) == 4 ? 2 : 3; }

StrideList all_strides(std::vector<Operand>& tensors, StrideList const& others) {
  StrideList all = others;
  for (Operand& tensor : tensors) all.push_back(tensor.strides);
  return all;
}

// Folds a single row to rows of `width` columns, the last of them shorter.
void fold(PointwisePlan& plan, StrideList const& tensors, int64_t width) {
  PointwiseExtents& extents = plan.extents;
  plan.last_columns = extents.columns;
  if (extents.outer != 1 || extents.rows != 1 || extents.columns <= width) return;
  extents.rows = ceil_divide(extents.columns, width);
  plan.last_columns = extents.columns - (extents.rows - 1) * width;
  extents.columns = width;
  for (int64_t* strides : tensors) strides[1] = strides[2] * width;
}

// Whether every row of the tensor can be read in groups of `elements`; a row of copies of one element can.
bool allows_groups(Operand const& tensor, PointwiseExtents const& extents, int elements) {
  if (tensor.strides[2] == 0) return true;
  auto const stays_aligned = [&](int64_t extent, int64_t stride) { return extent == 1 || stride % elements == 0; };
  return tensor.strides[2] == 1 && reinterpret_cast<uintptr_t>(tensor.data) % (elements * size_of(tensor.dtype)) == 0 &&
         stays_aligned(extents.rows, tensor.strides[1]) && stays_aligned(extents.outer, tensor.strides[0]);
}

bool all_allow_groups(std::vector<Operand> const& tensors, PointwiseExtents const& extents, int elements) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](Operand const& tensor) { return allows_groups(tensor, extents, elements); });
}

// Whether all tensors are moved by vectors of the first one's type. Behind the first two, which are the input and the
// result or its gradient, are derivatives: one of fp32 takes several stores.
bool all_vectors(std::vector<Operand> const& tensors, PointwiseExtents const& extents) {
  DType const dtype = tensors[0].dtype;
  int const elements = elements_per_vector(dtype);
  for (size_t k = 0; k < tensors.size(); ++k) {
    bool const is_derivative = k >= 2;
    bool const has_type = tensors[k].dtype == dtype || (is_derivative && tensors[k].dtype == DType::kFloat32);
    if (!has_type || tensors[k].strides[2] != 1 || !allows_groups(tensors[k], extents, elements)) return false;
  }
  return true;
}

// Splits positions along a row into the fewest tiles of at most a block, evenly, in whole warps where there are
// several.
int even_width(int64_t positions, int threads) {
  int64_t const tiles = ceil_divide(positions, threads);
  int64_t const width = ceil_divide(positions, tiles);
  return static_cast<int>(width <= 32 ? width : std::min<int64_t>(ceil_divide(width, 32) * 32, threads));
}

// Lays lines over the extents; `elements` per thread, in groups of 2^shift.
void lay_along_columns(PointwisePlan& plan, int elements, int shift, int width, int threads) {
  plan.along_rows = false;
  plan.shift = shift;
  plan.width = width;
  plan.height = static_cast<int>(std::min<int64_t>(threads / plan.width, plan.extents.rows));
  plan.step = plan.width << shift;
  plan.tile_columns = static_cast<int64_t>(plan.width) * elements;
}

void lay_along_rows(PointwisePlan& plan, int width, int threads) {
  plan.along_rows = true;
  plan.shift = 0;
  plan.width = width;
  plan.height =
      static_cast<int>(std::min<int64_t>(threads / plan.width, ceil_divide(plan.extents.rows, kPointwiseFragment)));
  plan.step = plan.height;
  plan.tile_columns = plan.width;
}

// choose_width: threads of a block for so many positions along a row.
template <class ChooseWidth>
void lay_lines(PointwisePlan& plan, std::vector<Operand> const& tensors, int threads, ChooseWidth const& choose_width) {
  int64_t const groups = ceil_divide(plan.extents.columns, kPointwiseFragment);
  if (all_allow_groups(tensors, plan.extents, kLineVector)) {
    lay_along_columns(plan, kPointwiseFragment, 2, choose_width(groups, kPointwiseFragment), threads);
  } else if (plan.extents.rows >= kPointwiseFragment) {
    lay_along_rows(plan, choose_width(plan.extents.columns, 1), threads);
  } else {
    lay_along_columns(plan, kPointwiseFragment, 0, choose_width(groups, kPointwiseFragment), threads);
  }
}

// Rows that a block covers in one step of its threads.
int64_t rows_per_step(PointwisePlan const& plan) {
  return static_cast<int64_t>(plan.height) * (plan.along_rows ? kPointwiseFragment : 1);
}

// Collapsed, and folded for blocks of vectors.
PointwisePlan begin_plan(PointwiseExtents extents, StrideList const& all, PointwiseBlock const& block) {
  collapse(extents, all);
  if (extents.outer > extents.rows) {  // blocks cover several rows, never several outer indices
    std::swap(extents.outer, extents.rows);
    for (int64_t* strides : all) std::swap(strides[0], strides[1]);
  }
  PointwisePlan plan = {};
  plan.extents = extents;
  fold(plan, all, static_cast<int64_t>(block.threads) * block.elements);
  return plan;
}

void lay_vectors(PointwisePlan& plan, DType dtype, PointwiseBlock const& block) {
  lay_along_columns(plan, block.elements, vector_shift(dtype),
                    even_width(ceil_divide(plan.extents.columns, block.elements), block.threads), block.threads);
}

// A thread takes a vector of each of its rows. What a column's sum depends on, the rows of a block and of a step of its
// threads, stays as it is.
PointwisePlan plan_columns(PointwiseExtents const& extents, std::vector<Operand>& tensors, StrideList const& others) {
  PointwisePlan plan = plan_pointwise_backward(extents, tensors, others, true);
  int64_t const elements = elements_per_vector(tensors[0].dtype);
  plan.vectors = all_vectors(tensors, plan.extents) && extents.columns % elements == 0;
  if (!plan.vectors) return plan;
  plan.shift = vector_shift(tensors[0].dtype);
  plan.step = 0;
  plan.tile_columns = plan.width * elements;
  plan.column_tiles = ceil_divide(extents.columns, plan.tile_columns);
  return plan;
}

// Rows and columns are what the kernels of pointwise_templates.cu count in 32 bits. Columns are fewer unless two rows
// take 4 GB, and so are rows unless they take 16 GB and cannot be merged.
bool is_counted(PointwiseExtents const& extents) {
  return extents.rows <= kMostCounted && extents.columns <= kMostCounted;
}

}  // namespace

void collapse(PointwiseExtents& extents, StrideList const& tensors) {
  int64_t sizes[3] = {extents.outer, extents.rows, extents.columns};
  int last = 2;  // the dimension that is being filled, from the right
  for (int next = 1; next >= 0; --next) {
    if (sizes[next] == 1) continue;
    bool const empty = sizes[last] == 1;
    bool const mergeable = empty || std::all_of(tensors.begin(), tensors.end(), [&](int64_t const* strides) {
                             return strides[next] == strides[last] * sizes[last];
                           });
    if (!mergeable) --last;
    for (int64_t* strides : tensors) {
      if (!mergeable || empty) strides[last] = strides[next];
    }
    sizes[last] = mergeable ? sizes[last] * sizes[next] : sizes[next];
    if (last != next) sizes[next] = 1;
  }
  for (int dimension = 0; dimension < last; ++dimension) {
    sizes[dimension] = 1;
    for (int64_t* strides : tensors) strides[dimension] = 0;
  }
  extents = {sizes[0], sizes[1], sizes[2]};
}

PointwisePlan plan_pointwise(PointwiseExtents extents, std::vector<Operand>& tensors, StrideList const& others,
                             PointwiseBlock const& block, int multiprocessors) {
  PointwisePlan plan = begin_plan(extents, all_strides(tensors, others), block);
  if (all_vectors(tensors, plan.extents)) {
    int64_t const ragged = plan.last_columns % elements_per_vector(tensors[0].dtype);
    plan.vectors = ragged == 0 || plan.extents.rows * plan.extents.columns >= kWorthTwoLaunches;
    if (plan.vectors) {
      plan.tail = ragged;
      plan.last_columns -= ragged;
    }
  }
  if (plan.vectors) {
    lay_vectors(plan, tensors[0].dtype, block);
  } else {
    lay_lines(plan, tensors, block.threads,
              [&](int64_t positions, int) { return even_width(positions, block.threads); });
  }
  plan.column_tiles = ceil_divide(plan.extents.columns, plan.tile_columns);
  int64_t steps = block.rows;
  auto const blocks = [&](int64_t rows) {
    return plan.extents.outer * plan.column_tiles * ceil_divide(plan.extents.rows, rows);
  };
  while (steps > 1 && blocks(steps * rows_per_step(plan)) < kBlocksInFlight * multiprocessors) steps /= 2;
  plan.tile_rows = steps * rows_per_step(plan);
  plan.row_tiles = ceil_divide(plan.extents.rows, plan.tile_rows);
  plan.by_width = divisor_of(plan.width);
  plan.by_column_tiles = divisor_of(plan.column_tiles);
  return plan;
}

PointwisePlan plan_pointwise_backward(PointwiseExtents extents, std::vector<Operand>& tensors, StrideList const& others,
                                      bool keep_columns) {
  StrideList const all = all_strides(tensors, others);
  PointwisePlan plan = {};
  if (!keep_columns) collapse(extents, all);
  plan.extents = extents;
  plan.last_columns = extents.columns;
  if (!keep_columns) fold(plan, all, kBackwardColumns);
  lay_lines(plan, tensors, kBackwardThreads, [](int64_t positions, int elements) {
    int64_t const tiles = ceil_divide(positions, std::min<int64_t>(kBackwardColumns / elements, kBackwardThreads));
    return static_cast<int>(ceil_divide(positions, tiles));
  });
  plan.column_tiles = ceil_divide(plan.extents.columns, plan.tile_columns);
  plan.row_tiles = pointwise_backward_row_blocks(plan.extents.rows, plan.extents.columns);
  plan.tile_rows = ceil_divide(plan.extents.rows, plan.row_tiles);
  return plan;
}

PointwisePlan plan_backward_vectors(PointwiseExtents extents, std::vector<Operand>& tensors, StrideList const& others,
                                    PointwiseBlock const& block, bool keep_columns) {
  if (keep_columns) return plan_columns(extents, tensors, others);
  PointwisePlan plan = begin_plan(extents, all_strides(tensors, others), block);
  plan.vectors = all_vectors(tensors, plan.extents) && plan.last_columns % elements_per_vector(tensors[0].dtype) == 0 &&
                 plan.extents.columns % elements_per_vector(tensors[0].dtype) == 0;
  if (!plan.vectors) return plan;
  lay_vectors(plan, tensors[0].dtype, block);
  plan.column_tiles = ceil_divide(plan.extents.columns, plan.tile_columns);
  plan.tile_rows = plan.height;
  plan.row_tiles = ceil_divide(plan.extents.rows, plan.tile_rows);
  return plan;
}

int64_t pointwise_backward_row_blocks(int64_t rows, int64_t columns) {
  if (rows <= 0 || columns <= 0) return 0;
  int64_t const column_tiles = ceil_divide(columns, kBackwardColumns);
  int64_t const most = std::min(ceil_divide(rows, kBackwardRows), kMostBackwardRowBlocks);
  int64_t const wanted = std::clamp<int64_t>(kBackwardBlocks / column_tiles, 1, most);
  return ceil_divide(rows, ceil_divide(rows, wanted));
}

bool is_empty(PointwiseExtents const& extents) {
  return extents.outer == 0 || extents.rows == 0 || extents.columns == 0;
}

StrideList strides_of(Program const& program, Operands& operands) {
  StrideList strides;
  for (int k = 0; k < program.operand_count; ++k) strides.push_back(operands.items[k].strides);
  return strides;
}

Operand contiguous(void const* data, DType dtype, PointwiseExtents const& extents) {
  return {data, {extents.rows * extents.columns, extents.columns, 1}, dtype};
}

Operand result_of(PointwiseProblem const& problem) {
  PointwiseExtents const& extents = problem.extents;
  int64_t const pitch = problem.out_pitch > 0 ? problem.out_pitch : extents.columns;
  return {problem.out, {extents.rows * pitch, pitch, 1}, problem.out_dtype};
}

PointwiseBlock compiled_block(DType dtype) { return {kChainVectors * elements_per_vector(dtype), kVectorThreads, 1}; }

std::string specialized_template(DType dtype) { return std::string("pointwise_") + name_of(dtype); }

std::string specialized_kernel(PointwiseProblem const& problem) {
  Program const& program = problem.program;
  PointwiseExtents const& extents = problem.extents;
  if (!is_interpreted(program) || is_empty(extents)) return {};
  Operands operands = problem.operands;
  std::vector<Operand> tensors = {problem.x, result_of(problem)};
  // Rows of a block depend on the number of multiprocessors, and whether vectors are taken does not.
  constexpr int kMultiprocessors = 1;
  PointwisePlan const plan = plan_pointwise(extents, tensors, strides_of(program, operands),
                                            compiled_block(problem.x.dtype), kMultiprocessors);
  return plan.vectors && is_counted(plan.extents) ? specialized_template(problem.x.dtype) : std::string();
}

std::vector<WantedDerivative> derivatives_of(PointwiseBackwardProblem const& problem) {
  std::vector<WantedDerivative> derivatives(problem.derivatives, problem.derivatives + problem.derivative_count);
  bool const has_x = std::any_of(derivatives.begin(), derivatives.end(),
                                 [](WantedDerivative const& wanted) { return wanted.wrt == 0; });
  if (problem.column_partials != nullptr && !has_x) derivatives.push_back({0, nullptr, DType::kFloat32});
  return derivatives;
}

BackwardPlan specialized_backward_plan(PointwiseBackwardProblem const& problem) {
  BackwardPlan result = {{}, derivatives_of(problem), {problem.x, problem.grad}, problem.operands};
  std::sort(result.derivatives.begin(), result.derivatives.end(),
            [](WantedDerivative const& a, WantedDerivative const& b) { return a.wrt < b.wrt; });
  for (WantedDerivative const& wanted : result.derivatives) {
    result.tensors.push_back(contiguous(wanted.data, wanted.dtype, problem.extents));
  }
  result.plan = plan_backward_vectors(problem.extents, result.tensors, strides_of(problem.program, result.operands),
                                      compiled_block(problem.x.dtype), problem.column_partials != nullptr);
  return result;
}

std::string specialized_kernel(PointwiseBackwardProblem const& problem) {
  bool const is_taken = problem.program.length > 0 && problem.reduction == Reduction::kNone &&
                        !is_empty(problem.extents) && !derivatives_of(problem).empty();
  if (!is_taken) return {};
  BackwardPlan const planned = specialized_backward_plan(problem);
  if (!planned.plan.vectors) return {};
  specialize::Inputs wrt;
  for (WantedDerivative const& wanted : planned.derivatives) wrt.push_back(wanted.wrt);
  std::string const kind = problem.column_partials != nullptr ? "pointwise_backward_columns_" : "pointwise_backward_";
  return specialize::derivative_kernel(kind + name_of(problem.x.dtype), wrt);
}

}  // namespace cutfuse
