#include "reduce/reduce_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/ceil_divide.h"
#include "reduce/reductions.h"

namespace cutfuse {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;
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
constexpr int64_t kTileRowBytes = 2048;  // rows longer than this feed the row kernel well whatever their alignment
constexpr int64_t kPeriodInBlock = 64;   // threads of a super-row up to which one block holds all of it

int64_t power_of_two_at_least(int64_t x) {
  int64_t power = 1;
  while (power < x) power *= 2;
  return power;
}

int elements_per_vector(DType dtype) { return kVectorBytes / static_cast<int>(size_of(dtype)); }

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
  while (has_program && is_better(lanes / 2)) lanes /= 2;
  return lanes;
}

// Whether rows begin on a boundary of 16 bytes and end on one.
bool has_whole_vectors(ReduceLayout const& layout, int vector) {
  ReduceExtents const& extents = layout.extents;
  return layout.aligned && extents.reduced % vector == 0 && (extents.outer == 1 || layout.strides[0] % vector == 0) &&
         (extents.inner == 1 || layout.strides[2] % vector == 0);
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
  int64_t const wanted =
      plan.lanes == kThreads ? split_count(rows, bytes / kSplitBytes, kSplitBlocks, multiprocessors) : int64_t{1};
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

ReducePlan plan_strided_layout(ReduceLayout const& layout, int multiprocessors) {
  ReduceExtents const& extents = layout.extents;
  int const vector = layout.has_program ? kProgramColumns : elements_per_vector(layout.dtype);
  bool const neighbours = layout.strides[2] == 1 && extents.inner > 1;
  bool const contiguous = neighbours && layout.strides[1] == extents.inner;
  bool const aligned_rows = neighbours && layout.aligned && extents.inner % vector == 0 &&
                            layout.strides[1] % vector == 0 && (extents.outer == 1 || layout.strides[0] % vector == 0);
  if (aligned_rows) {
    int64_t const wanted_blocks = layout.has_program ? kProgramSplitBlocks : kSplitBlocks;
    ReducePlan plan = plan_strided(extents, vector, 1, wanted_blocks, multiprocessors);
    plan.whole_vectors = true;
    plan.by_width = divisor_of(plan.width);
    plan.by_height = divisor_of(plan.height);
    plan.by_period = divisor_of(plan.period);
    plan.by_tiles = divisor_of(ceil_divide(extents.outer * plan.period, plan.width));
    return plan;
  }
  int const super_row = super_row_of(extents.inner, vector);
  if (contiguous && !layout.has_program && worth_super_rows(extents, vector, super_row)) {
    return plan_strided(extents, vector, super_row, kSplitBlocks, multiprocessors);
  }
  return plan_strided(extents, 1, 1, kSplitBlocks, multiprocessors);
}

}  // namespace

ReduceLayout normalize(ReduceLayout layout) {
  bool const rows_are_neighbours = layout.extents.inner == 1 && layout.extents.outer > 1 && layout.strides[0] == 1;
  if (rows_are_neighbours && layout.strides[1] != 1) {
    std::swap(layout.extents.outer, layout.extents.inner);
    std::swap(layout.strides[0], layout.strides[2]);
  }
  return layout;
}

ReducePlan plan_reduce(ReduceLayout const& layout, int multiprocessors) {
  ReduceExtents const& extents = layout.extents;
  bool const rows = layout.strides[1] == 1 && (extents.inner == 1 || extents.reduced > 1);
  if (!rows) return plan_strided_layout(layout, multiprocessors);
  int64_t const bytes = extents.reduced * static_cast<int64_t>(size_of(layout.dtype));
  bool const packed = extents.inner == 1 && layout.strides[0] == extents.reduced;
  if (packed && !layout.has_program && bytes <= kTileRowBytes && (bytes % kVectorBytes != 0 || !layout.aligned)) {
    return plan_row_tiles(extents, layout.dtype);
  }
  ReducePlan plan = plan_rows(extents, layout.dtype, layout.has_program, multiprocessors);
  plan.whole_vectors = has_whole_vectors(layout, plan.vector);
  return plan;
}

size_t reduce_workspace(ReduceExtents const& extents, DType dtype, Reduction reduction, int multiprocessors) {
  constexpr bool kHasProgram = false;  // a program changes nothing where rows are few enough to be split
  int64_t rows = plan_rows(extents, dtype, kHasProgram, multiprocessors).partial_rows;
  ReduceExtents const turned = {1, extents.reduced, extents.outer};  // see normalize
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

}  // namespace cutfuse
