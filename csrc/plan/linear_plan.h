// How a linear layer is computed, y = reduce(program(x @ weight^T + bias, operands)): what that depends on, which is no
// pointer; what is launched in which order, over which memory, and why not otherwise. Running a call, explaining it and
// the tests read this one plan. Host code that knows no CUDA.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "common/dtype.h"
#include "plan/gemm_configs.h"
#include "reduce/reductions.h"
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
  DeviceTimes const* times = nullptr;  // see GemmProblem
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
  // A row of the result has the same bits however many rows x has: by kernels that add in one order, which the weight,
  // the types and what follows decide. cuBLAS is no alternative.
  bool batch_invariant;
  DeviceFacts device;
  Issuer issuer;

  bool joins_weights() const { return !joined_rows.empty(); }

  // What the epilogue takes in a fused kernel.
  float fused_cost() const { return specialized_cost.value_or(epilogue_cost); }
};

// The memory that the launches of a plan hand on to each other: pieces of one workspace.

enum class Memory : int32_t {
  kWorkspace,     // of this call
  kWeightPlanes,  // of the weight's planes, which outlive it
};

struct Piece {
  Memory memory;
  int64_t offset;  // bytes from the memory's beginning
  int64_t bytes;   // 0: there is no such piece
};

// What a pass that splits a matrix leaves: see Planes.
struct PlanesPieces {
  Piece values;
  Piece scales;
  Piece flags;
};

// Where a piece may begin, in bytes: a line of the L2 for each of a block of columns, and what PyTorch's allocator
// gives.
constexpr int64_t kPieceAlignment = 256;

// Lays pieces out one behind the other.
class MemoryLayout {
 public:
  explicit MemoryLayout(Memory memory) : memory_(memory) {}

  Piece add(int64_t bytes);

  // Where the next piece begins. Going back to an earlier end writes over what was added since.
  int64_t end() const { return end_; }
  void go_back(int64_t end) { end_ = end; }

  // Of all pieces that were ever added.
  int64_t bytes() const { return bytes_; }

 private:
  Memory memory_;
  int64_t end_ = 0;
  int64_t bytes_ = 0;
};

// The planes of a weight in memory of their own.
struct WeightPlanes {
  PlanesPieces pieces;
  int64_t bytes;
};

WeightPlanes lay_weight_planes(PlanesShape const& shape);

// The launches of a plan. Those that wait for a guard are always launched: what the guard's flags say is known on the
// device alone, and a kernel whose turn it is not returns at once. A guard is flags of operands' planes.

// Splits x or the weight into planes.
struct SplitPass {
  bool is_weight;
  SplitScheme scheme;
  PlanesPieces planes;
  Piece cleared;             // set to zero on the way: the arrivals of the product that follows
  std::vector<Piece> guard;  // empty where it always runs
  SplitRun when;
};

enum class CopiedMatrix : int32_t { kX, kWeight, kResult };

// Copies x or the weight to lines that begin at multiples of kOperandAlignment bytes, as the copy engine takes them, or
// from such lines to the caller's result.
struct AlignedCopy {
  CopiedMatrix matrix;
  int64_t lines;   // that are contiguous: rows or columns
  int64_t length;  // of a line, in elements
  int64_t from_pitch;
  int64_t to_pitch;
  Piece aligned;
};

// The matrix product with what follows it, by one kernel.
struct FusedProduct {
  GemmProblem problem;
  GemmCandidate kernel;
  PlanesPieces x;  // without bytes, as the next one, where the operand is read as it is; of a copy, its values
  PlanesPieces weight;
  Piece result;        // that is copied to the caller's; without bytes where it is stored there
  Piece weight_flags;  // that splitting the weight on its way in leaves
  Piece sums;          // of slices of K, and the tiles at which they arrive: see KSlices
  Piece arrivals;
  Piece partials;  // that a row reduction leaves: fp32 [tiles along N, M, partial_width(reduction)]
  std::vector<Piece> guard;
  SplitRun when;
};

// Folds the partials of a row reduction to the result.
struct FoldPartials {
  Piece partials;
  int64_t tiles;
  bool batch_invariant;  // see FoldProblem
};

// x @ weight^T + bias by PyTorch.
struct CublasProduct {};

// program(z, operands) over cuBLAS's result; in place where that has the result's type.
struct PointwisePass {
  bool in_place;
};

// reduce(program(z, operands)) over cuBLAS's result.
struct ReductionPass {};

using Launch =
    std::variant<SplitPass, AlignedCopy, FusedProduct, FoldPartials, CublasProduct, PointwisePass, ReductionPass>;

// A way of computing the layer, with all its launches.
struct Alternative {
  std::string name;       // of its kernel, or "cuBLAS ..."
  double microseconds;    // predicted; 0 where no kernel takes the problem
  double compared;        // what the choice compares: microseconds, weighed with what the predictions' error is worth
  int slices;             // of K
  std::string rejection;  // why it cannot or is not to run, whatever it would take; empty otherwise
};

struct LinearPlan {
  LinearRequest request;
  std::string ruled_out;                  // why no fused kernel is an alternative; empty where some are
  std::vector<Alternative> alternatives;  // fused ones by what is compared, then rejected ones, and cuBLAS last
  int chosen;
  std::vector<Launch> launches;
  int64_t workspace_bytes;            // of all launches together
  std::vector<int64_t> output_shape;  // [M, N], or [M]
  bool copies_bias;                   // to contiguous, aligned memory first
  bool reads_weight_planes;           // those that the weight has already

  bool is_fused() const { return chosen + 1 < static_cast<int>(alternatives.size()); }
};

// What one way is predicted to take: that of a kernel of the table, or of cuBLAS, whatever they are rejected for. For
// fits, which compare it with what was measured.
double predict_way(LinearRequest const& request, std::string const& name);

// Empty on devices that have fused kernels.
std::string why_no_kernels(DeviceFacts const& device);

// `only` names the one alternative that is wanted, whatever it would take: for tests and measurements; empty for the
// fastest. Throws std::invalid_argument for a request that is none, or where `only` cannot run.
LinearPlan plan_linear(LinearRequest const& request, std::string const& only = {});

}  // namespace cutfuse
