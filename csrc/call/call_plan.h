// Everything that the plan of a call depends on, and what a call whose key is known does. Plans are made by Python for
// the first call with that key, and never changed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "call/python_objects.h"
#include "call/torch_state.h"
#include "launch/launcher.h"
#include "plan/linear_plan.h"

namespace cutfuse::call {

class CallKey {
 public:
  void add(uint64_t word) {
    if (size_ < kMaxWords) words_[size_] = word;
    ++size_;
    hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 29;
  }

  // Its memory counts only by whether it is aligned.
  void add(TensorFacts const& tensor) {
    bool const aligned = reinterpret_cast<uintptr_t>(tensor.data) % kAlignment == 0;
    add(tensor.dtype << 16 | static_cast<uint64_t>(tensor.ndim) << 8 | static_cast<uint64_t>(tensor.device_type) << 1 |
        (aligned ? 1 : 0));
    add(static_cast<uint64_t>(tensor.device_index));
    for (int d = 0; d < tensor.ndim; ++d) {
      add(static_cast<uint64_t>(tensor.sizes[d]));
      add(static_cast<uint64_t>(tensor.strides[d]));
    }
  }

  // Whether everything had room.
  bool is_complete() const { return size_ <= kMaxWords; }

  bool operator==(CallKey const& other) const {
    return size_ == other.size_ && std::equal(words_, words_ + size_, other.words_);
  }

  struct Hash {
    size_t operator()(CallKey const& key) const { return static_cast<size_t>(key.hash_); }
  };

 private:
  static constexpr size_t kMaxWords = 160;
  static constexpr uintptr_t kAlignment = 16;  // bytes

  uint64_t hash_ = 0;
  size_t size_ = 0;
  uint64_t words_[kMaxWords];
};

// Tuples of integers and a torch.dtype.
struct ResultLayout {
  PyRef sizes;
  PyRef strides;
  PyRef dtype;
};

// x @ weight.T + bias and what follows it, as the planner says. A plan that stores the pre-activation gives it beside
// the result, as a tuple.
struct LinearSteps {
  LinearPlan plan;
  SpecializedEpilogues epilogues;
  Program program = {};
  Operands operands = {};            // without addresses, as those of all steps
  bool has_planes = false;           // of the weight, in the call's last tensor: the plan may read them
  PyRef multiply;                    // function(x, weight, bias or None) in place of F.linear; null for that
  ResultLayout pre_activation = {};  // of a fused plan that stores it
};

// The products of x with several weights, side by side, as the planner says: by one kernel. The call's tensors are x,
// the weights, and the biases that there are.
struct JoinedSteps {
  LinearPlan plan;
  std::vector<bool> has_bias;  // of each weight
};

// PyTorch's own linear layer and nothing else.
struct ProductSteps {};

// PyTorch's own linear layer, and one function of its result and the operands, for autograd to record.
struct OperationSteps {
  PyRef function;
  std::vector<int> arguments;  // 0 for the layer's result, k for operand k - 1
};

// A problem of these steps has no addresses: a call fills in its own.
struct PointwiseSteps {
  PointwiseProblem problem;
  specialize::Specialization const* specialization;  // null where the program is interpreted for good
};

struct ReduceSteps {
  ReduceProblem problem;
  specialize::Specialization const* specialization;  // as of PointwiseSteps
};

// The sum over a dimension of memory that the kernel of the gradients stores, by one more launch.
struct GradientSum {
  ReduceProblem problem;
  PyRef workspace;  // a tuple of one integer; null for none
  ResultLayout result;
};

// Where a derivative of the problem is stored, in x's shape. An operand that is broadcast has the sum of it for its
// gradient.
struct GradientOutput {
  ResultLayout layout;
  std::optional<GradientSum> sum;
  bool in_place = false;  // where its input lies, which nobody reads afterwards
};

// The sum over the rows of a matrix: of the partial sums of x's gradient, which the kernel of the gradients stores, or
// where a gradient is handed on, of that itself, and `partials` is not allocated.
struct ColumnSum {
  ResultLayout partials;
  GradientSum sum;
};

// The gradients of y = program(x, operands), and the sum of x's. In a call of its own the tensors are the gradient of
// y, x, the operands and, where a reduction needs them, its result and its ties.
struct GradientSteps {
  PointwiseBackwardProblem problem;
  std::vector<GradientOutput> outputs;  // of each of the problem's derivatives
  std::optional<ColumnSum> column_sum;
  specialize::Specialization const* specialization;  // null where the derivatives are interpreted for good
};

// A call that autograd records: `apply` of an autograd.Function, given `plan` and the call's tensors, bias or None
// among them.
struct TrainingSteps {
  PyRef apply;
  PyRef plan;
  SpecializedEpilogues epilogues;  // of its passes, in any order
};

// A call of several operations, which a function makes, given the call's tensors, and None for those that it lacks.
struct FunctionSteps {
  PyRef function;
  std::vector<bool> is_given;  // which of the function's arguments are tensors
};

// Calls that take the general path every time.
struct GeneralSteps {};

using Steps = std::variant<GeneralSteps, ProductSteps, OperationSteps, LinearSteps, PointwiseSteps, ReduceSteps,
                           GradientSteps, TrainingSteps, JoinedSteps, FunctionSteps>;

struct CallPlan {
  Steps steps;
  ResultLayout result;
  PyRef workspace_sizes;  // a tuple of one integer; null for none
};

// Plans by key. Bounded: a full table is emptied, as a program has either few keys or ever new ones.
class PlanTable {
 public:
  static constexpr size_t kLimit = 8192;

  std::shared_ptr<CallPlan const> find(CallKey const& key) const;
  void insert(CallKey const& key, std::shared_ptr<CallPlan const> plan);
  void clear();
  size_t size() const;

 private:
  std::unordered_map<CallKey, std::shared_ptr<CallPlan const>, CallKey::Hash> plans_;
};

PlanTable& plan_table();

}  // namespace cutfuse::call
