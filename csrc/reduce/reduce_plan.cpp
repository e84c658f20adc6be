#include "reduce/reduce_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/division.h"
#include "epilogue/program.h"
#include "reduce/reductions.h"

namespace cutfuse {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kLoadsInFlight = 8;       // vectors that a thread of the strided kernel loads before it uses the first
constexpr int64_t kBlocksInFlight = 4;  // per multiprocessor: fewer cannot keep the memory busy
// Per multiprocessor, once a reduction is split: one wave. Column sums of 8192x8192 bf16 take 46 us with 4, 51 with 8
// and 58 with 16 (H200): more splits are more partial rows.
constexpr int64_t kSplitBlocks = 4;
constexpr int64_t kSplitBytes = 32768;      // of a row that are worth a block
constexpr int64_t kLongestChunk = 1 << 30;  // elements: counts within a chunk fit an int
constexpr int64_t kVectorsPerLane = 8;      // of a row: a thread's start costs as much as four
constexpr int64_t kFewestLanes = 4;         // of a row that has as many vectors: a load takes 64 neighbouring bytes
// The same where a program comes first, as long as so many blocks a multiprocessor are left: a row's beginning and end
// cost its threads some 200 instructions, and a vector of six light ops 100. With 12 blocks sums of rows of bf16 took 4
// to 25% longer (H200; 12608x3072 with three operands: 55 us and 44).
constexpr int64_t kProgramVectorsPerLane = 32;
constexpr int64_t kProgramBlocks = 3;
// One wave of blocks that have eight states a thread; with two, sums of columns take 4 to 8% longer (H200).
constexpr int64_t kProgramSplitBlocks = 3;
constexpr int64_t kLongReduction =
    64;  // super-rows from which threads also lie side by side along the reduced dimension
constexpr int64_t kManySuperRows = 128;  // super-rows from which their partial rows are under 4% of the traffic
constexpr int64_t kTileBytes = 16384;
constexpr int64_t kTileRowBytes = 2048;    // rows longer than this feed the row kernel well whatever their alignment
constexpr int64_t kPeriodInBlock = 64;     // threads of a super-row up to which one block holds all of it
constexpr int64_t kFewTiles = 16;          // of a fold, up to which one thread folds a row alone
constexpr int kSectorRows = 8;             // fp32 partials of neighbouring rows that fill a 32-byte sector
constexpr int64_t kManyRows = 65536;       // from which warps of neighbouring rows fill the device
constexpr int64_t kFoldedBytes = 8 << 20;  // of partial sums, which the kernel that has stored them leaves in the L2

int64_t power_of_two_at_least(int64_t x) {
  int64_t power = 1;
  while (power < x) power *= 2;
  return power;
}

// How many ways to split a reduction: none where `blocks` fill the device, otherwise at most `most`.
int64_t split_count(int64_t blocks, int64_t most, int64_t wanted_blocks, int multiprocessors) {
  if (blocks >= kBlocksInFlight * multiprocessors) return 1;
  return std::clamp<int64_t>(wanted_blocks * multiprocessors / std::max<int64_t>(blocks, 1), 1,
                             std::max<int64_t>(most, 1));
}

int64_t lanes_of(int64_t rows, int64_t vectors, bool has_program, int multiprocessors) {
  int64_t const fewest = std::min<int64_t>(vectors, kFewestLanes);
  int64_t lanes = power_of_two_at_least(std::max(ceil_divide(vectors, kVectorsPerLane), fewest));
  lanes = std::min<int64_t>(lanes, kThreads);
  auto const is_better = [&](int64_t fewer) {
    return fewer >= fewest && vectors <= fewer * kProgramVectorsPerLane &&
           rows * fewer >= kProgramBlocks * multiprocessors * kThreads;
  };
  while (has_program && multiprocessors > 0 && is_better(lanes / 2)) lanes /= 2;
  return lanes;
}

bool is_aligned(void const* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; }

// Whether rows begin on a boundary of 16 bytes and end on one.
bool has_whole_vectors(ReduceProblem const& problem, int vector) {
  ReduceExtents const& extents = problem.extents;
  Operand const& x = problem.x;
  return is_aligned(x.data) && extents.reduced % vector == 0 && (extents.outer == 1 || x.strides[0] % vector == 0) &&
         (extents.inner == 1 || x.strides[2] % vector == 0);
}

ReducePlan plan_rows(ReduceExtents const& extents, DType dtype, bool has_program, int multiprocessors) {
  int64_t const rows = extents.outer * extents.inner;
  int const vector = elements_per_vector(dtype);
  int64_t const vectors = ceil_divide(extents.reduced, vector);
  ReducePlan plan = {};
  plan.path = ReducePath::kRows;
  plan.vector = vector;
  plan.lanes = static_cast<int>(lanes_of(rows, vectors, has_program, multiprocessors));
  int64_t const bytes = extents.reduced * static_cast<int64_t>(size_of(dtype));
  bool const may_split = plan.lanes == kThreads && multiprocessors > 0;
  int64_t const wanted = may_split ? split_count(rows, bytes / kSplitBytes, kSplitBlocks, multiprocessors) : int64_t{1};
  int64_t const granule = static_cast<int64_t>(kThreads) * vector;
  plan.chunk = std::min(ceil_divide(ceil_divide(extents.reduced, wanted), granule) * granule, kLongestChunk);
  plan.splits = std::max<int64_t>(ceil_divide(extents.reduced, plan.chunk), 1);
  plan.partial_rows = plan.splits > 1 ? plan.splits : 0;
  return plan;
}

ReducePlan plan_row_tiles(ReduceExtents const& extents, DType dtype) {
  int64_t const bytes = extents.reduced * static_cast<int64_t>(size_of(dtype));
  ReducePlan plan = {};
  plan.path = ReducePath::kRowTiles;
  plan.vector = elements_per_vector(dtype);
  plan.splits = 1;
  plan.chunk = extents.reduced;
  plan.tile_rows = static_cast<int>(std::max<int64_t>(kTileBytes / bytes, 1));
  plan.lanes = 1;
  while (plan.lanes < 32 && plan.lanes * 2 * plan.tile_rows <= kThreads) plan.lanes *= 2;
  return plan;
}

// vector: elements that a thread reads of a super-row; super_row: rows that make one up.
ReducePlan plan_strided(ReduceExtents const& extents, int vector, int super_row, int64_t wanted_blocks,
                        int multiprocessors) {
  ReducePlan plan = {};
  plan.path = ReducePath::kStrided;
  plan.vector = vector;
  plan.rows_per_super_row = super_row;
  plan.period = ceil_divide(super_row * extents.inner, vector);
  int64_t const super_rows = ceil_divide(extents.reduced, super_row);
  if (super_rows >= kLongReduction) {
    int64_t const widest = vector == 1 ? kThreads : kPeriodInBlock;
    plan.width = static_cast<int>(std::min(plan.period, widest));
    plan.height = static_cast<int>(std::min<int64_t>(kThreads / plan.width, super_rows / kLoadsInFlight));
  } else {
    plan.width = kThreads;
    plan.height = 1;
  }
  int64_t const blocks = ceil_divide(extents.outer * plan.period, plan.width);
  int64_t const most = super_rows / (int64_t{2} * kLoadsInFlight * plan.height);
  int64_t const wanted = split_count(blocks, most, wanted_blocks, multiprocessors);
  plan.chunk = ceil_divide(super_rows, wanted);
  // A misaligned tensor has one super-row more than super_rows: the last split takes it.
  plan.splits = ceil_divide(super_rows, plan.chunk);
  bool const block_holds_period = plan.width == plan.period;
  int64_t const rows_per_split = block_holds_period ? 1 : super_row;
  plan.partial_rows = plan.splits * rows_per_split > 1 ? plan.splits * rows_per_split : 0;
  return plan;
}

int super_row_of(int64_t inner, int vector) {
  return vector / static_cast<int>(std::gcd(inner, static_cast<int64_t>(vector)));
}

bool worth_super_rows(ReduceExtents const& extents, int vector, int super_row) {
  if (super_row == 1) return true;
  int64_t const super_rows = extents.reduced / super_row;
  bool const block_holds_period = super_row * extents.inner / vector <= kPeriodInBlock;
  return super_rows >= (block_holds_period ? kLongReduction : kManySuperRows);
}

bool has_program(ReduceProblem const& problem) { return problem.program.length > 0; }

ReducePlan plan_strided_layout(ReduceProblem const& problem, int multiprocessors) {
  ReduceExtents const& extents = problem.extents;
  Operand const& x = problem.x;
  int const vector = has_program(problem) ? kProgramColumns : elements_per_vector(x.dtype);
  bool const neighbours = x.strides[2] == 1 && extents.inner > 1;
  bool const contiguous = neighbours && x.strides[1] == extents.inner;
  bool const aligned_rows = neighbours && is_aligned(x.data) && extents.inner % vector == 0 &&
                            x.strides[1] % vector == 0 && (extents.outer == 1 || x.strides[0] % vector == 0);
  if (aligned_rows) {
    int64_t const wanted_blocks = has_program(problem) ? kProgramSplitBlocks : kSplitBlocks;
    ReducePlan plan = plan_strided(extents, vector, 1, wanted_blocks, multiprocessors);
    plan.whole_vectors = true;
    plan.by_width = divisor_of(plan.width);
    plan.by_height = divisor_of(plan.height);
    plan.by_period = divisor_of(plan.period);
    plan.by_tiles = divisor_of(ceil_divide(extents.outer * plan.period, plan.width));
    return plan;
  }
  int const super_row = super_row_of(extents.inner, vector);
  if (contiguous && !has_program(problem) && worth_super_rows(extents, vector, super_row)) {
    return plan_strided(extents, vector, super_row, kSplitBlocks, multiprocessors);
  }
  return plan_strided(extents, 1, 1, kSplitBlocks, multiprocessors);
}

constexpr int kAnyMultiprocessors = 1;  // how work is shared out depends on them, and which kernel takes it does not

// What the kernels of reduce_templates.cu count in 32 bits: results of rows, and of columns the threads across them and
// the rows. A tensor has fewer unless it takes 16 GB.
bool is_counted(PlannedReduce const& planned) {
  ReduceExtents const& extents = planned.problem.extents;
  if (planned.plan.path != ReducePath::kStrided) return extents.outer * extents.inner <= kMostCounted;
  return extents.outer * planned.plan.period <= kMostCounted && extents.reduced <= kMostCounted;
}

// The operands' dimensions follow the input's.
void turn(Operand& operand) { std::swap(operand.strides[0], operand.strides[2]); }

// How an operand lies along the line of a thread: its pieces follow each other along the reduced dimension, and a
// piece's elements too where rows are reduced.
specialize::OperandKind kind_on_line(Operand const& operand, ReducePath path) {
  using specialize::OperandKind;
  bool const is_same = operand.strides[1] == 0;
  bool const is_single = operand.strides[path == ReducePath::kStrided ? 2 : 1] == 0;
  if (is_same) return is_single ? OperandKind::kScalar : OperandKind::kRow;
  return is_single ? OperandKind::kColumn : OperandKind::kStrided;
}

// Columns of few fp32 rows, as the partial sums of a bias's gradient are. The strided kernel would have too few blocks,
// or splits and a launch to fold them: finalize_partials folds the rows themselves.
bool is_folded(ReduceProblem const& problem) {
  ReduceExtents const& extents = problem.extents;
  Operand const& x = problem.x;
  bool const is_matrix = extents.outer == 1 && x.strides[2] == 1 && x.strides[1] == extents.inner;
  int64_t const bytes = extents.reduced * extents.inner * static_cast<int64_t>(size_of(x.dtype));
  return is_matrix && x.dtype == DType::kFloat32 && !has_program(problem) && partial_width(problem.reduction) == 1 &&
         bytes <= kFoldedBytes;
}

// multiprocessors: 0 for plans that are the same however many rows there are.
ReducePlan plan_reduce(ReduceProblem const& problem, int multiprocessors) {
  ReduceExtents const& extents = problem.extents;
  Operand const& x = problem.x;
  bool const rows = x.strides[1] == 1 && (extents.inner == 1 || extents.reduced > 1);
  if (!rows && multiprocessors > 0 && is_folded(problem)) {
    ReducePlan plan = {};
    plan.path = ReducePath::kFolded;
    return plan;
  }
  if (!rows) return plan_strided_layout(problem, multiprocessors);
  int64_t const bytes = extents.reduced * static_cast<int64_t>(size_of(x.dtype));
  bool const packed = extents.inner == 1 && x.strides[0] == extents.reduced;
  bool const fills_vectors = bytes % kVectorBytes == 0 && is_aligned(x.data);
  bool const takes_tiles = packed && !has_program(problem) && bytes <= kTileRowBytes && !fills_vectors;
  if (takes_tiles && multiprocessors > 0) {
    return plan_row_tiles(extents, x.dtype);
  }
  ReducePlan plan = plan_rows(extents, x.dtype, has_program(problem), multiprocessors);
  plan.whole_vectors = has_whole_vectors(problem, plan.vector);
  return plan;
}

// Turns rows that are neighbours in memory (a transposed matrix) into the inner dimension.
void turn_rows(ReduceProblem& problem) {
  ReduceExtents& extents = problem.extents;
  int64_t const* const strides = problem.x.strides;
  bool const rows_are_neighbours = extents.inner == 1 && extents.outer > 1 && strides[0] == 1 && strides[1] != 1;
  if (!rows_are_neighbours) return;
  std::swap(extents.outer, extents.inner);
  turn(problem.x);
  for (Operand& operand : problem.operands.items) turn(operand);
}

// Whether weighted_row_sum takes the operand: the same fp32 vector for every row, in step with rows of whole vectors.
bool is_row_weight(Operand const& operand, ReduceProblem const& problem, ReducePlan const& plan) {
  ReduceExtents const& extents = problem.extents;
  Operand const& x = problem.x;
  bool const same_for_rows = extents.outer == 1 || operand.strides[0] == 0;
  bool const aligned_rows = is_aligned(x.data) && (extents.outer == 1 || x.strides[0] % plan.vector == 0);
  return plan.path == ReducePath::kRows && extents.inner == 1 && same_for_rows && aligned_rows &&
         operand.dtype == DType::kFloat32 && operand.strides[1] == 1 && is_aligned(operand.data);
}

// Takes a program that only scales out of a sum: a number to the end, an operand into the weighted kernel if it fits
// that.
void simplify(PlannedReduce& planned, int multiprocessors) {
  Scaling const scaling = find_scaling(planned.problem.program);
  if (!scaling.found || !is_additive(planned.problem.reduction)) return;
  ReduceProblem plain = planned.problem;
  plain.program.length = 0;
  if (scaling.weight >= 0) {
    if (multiprocessors == 0) return;  // of one row, every operand is the same for all rows
    Operand const& weight = plain.operands.items[scaling.weight];
    if (!is_row_weight(weight, plain, plan_reduce(plain, multiprocessors))) return;
    planned.weight = static_cast<float const*>(weight.data);
  }
  planned.scale = scaling.scale;
  planned.problem = plain;
}

}  // namespace

size_t reduce_workspace(ReduceExtents const& extents, DType dtype, Reduction reduction, int multiprocessors) {
  constexpr bool kHasProgram = false;  // a program changes nothing where rows are few enough to be split
  int64_t rows = plan_rows(extents, dtype, kHasProgram, multiprocessors).partial_rows;
  ReduceExtents const turned = {1, extents.reduced, extents.outer};  // see turn_rows
  for (ReduceExtents const& candidate : {extents, extents.inner == 1 ? turned : extents}) {
    int const vector = elements_per_vector(dtype);
    int const super_row = super_row_of(candidate.inner, vector);
    rows = std::max(rows, plan_strided(candidate, 1, 1, kSplitBlocks, multiprocessors).partial_rows);
    rows =
        std::max(rows, plan_strided(candidate, kProgramColumns, 1, kProgramSplitBlocks, multiprocessors).partial_rows);
    rows = std::max(rows, plan_strided(candidate, vector, 1, kSplitBlocks, multiprocessors).partial_rows);
    if (worth_super_rows(candidate, vector, super_row)) {
      rows = std::max(rows, plan_strided(candidate, vector, super_row, kSplitBlocks, multiprocessors).partial_rows);
    }
  }
  return static_cast<size_t>(rows * extents.outer * extents.inner) * partial_width(reduction) * sizeof(float);
}

PlannedReduce plan_program(ReduceProblem const& problem, int multiprocessors) {
  PlannedReduce planned = {};
  planned.problem = problem;
  planned.scale = 1.0f;
  turn_rows(planned.problem);
  if (has_program(problem)) simplify(planned, multiprocessors);
  planned.plan = plan_reduce(planned.problem, multiprocessors);
  return planned;
}

int fold_width(FoldProblem const& problem) {
  bool const has_few_tiles = problem.tiles <= kFewTiles;
  if (problem.batch_invariant) return has_few_tiles ? kThreads : kSectorRows;
  int const widest = has_few_tiles ? kThreads : (problem.rows >= kManyRows ? kWarp : kSectorRows);
  int width = 1;
  while (width < widest && width < problem.rows) width *= 2;
  return width;
}

std::string reduce_template(ReducePath path, DType dtype, Reduction reduction) {
  std::string const kernel = path == ReducePath::kStrided ? "strided_reduce_" : "row_reduce_";
  return kernel + name_of(first_of(info_of(reduction).fold)) + "_" + name_of(dtype);
}

std::string specialized_kernel(ReduceProblem const& problem) {
  if (is_empty(problem.extents) || problem.program.length == 0 || problem.reduction == Reduction::kNone) return {};
  PlannedReduce const planned = plan_program(problem, kAnyMultiprocessors);
  if (planned.problem.program.length == 0 || !planned.plan.whole_vectors || !is_counted(planned)) return {};
  return reduce_template(planned.plan.path, problem.x.dtype, problem.reduction);
}

specialize::OperandTypes specialized_operands(ReduceProblem const& problem) {
  specialize::OperandTypes types = {};
  if (is_empty(problem.extents)) return types;
  PlannedReduce const planned = plan_program(problem, kAnyMultiprocessors);
  for (int k = 0; k < problem.program.operand_count; ++k) {
    Operand const& operand = planned.problem.operands.items[k];
    types[k] = {operand.dtype, kind_on_line(operand, planned.plan.path)};
  }
  return types;
}

}  // namespace cutfuse
