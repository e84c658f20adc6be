#include "specialize/specialization.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "specialize/kernel_variant.h"

namespace cutfuse::specialize {

namespace {

std::atomic<Mode> of_process{Mode::kBackground};
thread_local std::optional<Mode> of_thread;
std::atomic<KernelCompiler*> compiler_in_use{nullptr};
std::atomic<bool> stalled_now = false;

class Registry {
 public:
  Specialization* find(std::string_view kernel, int device, Program const& program, OperandTypes const& types) {
    std::string key = std::string(kernel) + "@" + std::to_string(device) + "\n" + structure_of(program, types);
    std::lock_guard const lock(mutex_);
    auto const found = specializations_.find(key);
    if (found != specializations_.end()) return found->second;
    if (is_full()) return nullptr;
    auto* const made = new Specialization(std::string(kernel), device, program, types);
    specializations_.emplace(std::move(key), made);
    return made;
  }

  size_t size() const {
    std::lock_guard const lock(mutex_);
    return specializations_.size();
  }

  size_t compiled() const {
    std::lock_guard const lock(mutex_);
    size_t count = 0;
    for (auto const& [key, specialization] : specializations_) count += specialization->loaded() != nullptr ? 1 : 0;
    return count;
  }

  void forget() {
    std::lock_guard const lock(mutex_);
    specializations_.clear();
  }

 private:
  bool is_full() const {
    if (specializations_.size() < kMostSpecializations) return false;
    if (specializations_.size() >= kMostKnown) return true;
    auto const claimed = std::count_if(specializations_.begin(), specializations_.end(),
                                       [](auto const& item) { return item.second->is_claimed(); });
    return static_cast<size_t>(claimed) >= kMostSpecializations;
  }

  mutable std::mutex mutex_;
  std::unordered_map<std::string, Specialization*> specializations_;
};

Registry& registry() {
  static auto* const found = new Registry();  // never freed, as what it holds
  return *found;
}

// Whether the copy engine takes the operand: in the result's type, in rows that begin on its boundaries.
bool can_be_fetched(GemmConfig const& config, Operand const& operand, int64_t columns) {
  int64_t const row_bytes = operand.strides[1] * static_cast<int64_t>(size_of(operand.dtype));
  bool const is_matrix = operand.strides[2] == 1 && operand.strides[1] >= columns;
  bool const is_aligned =
      row_bytes % kOperandAlignment == 0 && reinterpret_cast<uintptr_t>(operand.data) % kOperandAlignment == 0;
  return fetches_operand(config) && operand.dtype == config.input && is_matrix && is_aligned;
}

Specialization* find_alone(std::string const& kernel, int device, Program const& program, OperandTypes const& types) {
  return kernel.empty() ? nullptr : find_specialization(kernel, device, program, types);
}

// Strided operands.
OperandTypes types_of(Program const& program, Operands const& operands) {
  OperandTypes types = {};
  for (int k = 0; k < program.operand_count; ++k) types[k].dtype = operands.items[k].dtype;
  return types;
}

OperandKind kind_by_strides(Operand const& operand) {
  int64_t const row_stride = operand.strides[1];
  int64_t const column_stride = operand.strides[2];
  if (column_stride == 0) return row_stride == 0 ? OperandKind::kScalar : OperandKind::kColumn;
  return row_stride == 0 && column_stride == 1 ? OperandKind::kRow : OperandKind::kStrided;
}

}  // namespace

Mode mode() { return of_thread ? *of_thread : process_mode(); }

Mode process_mode() { return of_process.load(std::memory_order_relaxed); }

void set_process_mode(Mode mode) { of_process.store(mode, std::memory_order_relaxed); }

std::optional<Mode> thread_mode() { return of_thread; }

void set_thread_mode(std::optional<Mode> mode) { of_thread = mode; }

KernelCompiler& kernel_compiler() {
  KernelCompiler* const other = compiler_in_use.load(std::memory_order_acquire);
  return other == nullptr ? driver_compiler() : *other;
}

void use_kernel_compiler(KernelCompiler* other) { compiler_in_use.store(other, std::memory_order_release); }

bool Specialization::compile(KernelCompiler& compiler) {
  std::lock_guard const compiling(compiling_);
  if (!is_pending()) return loaded() != nullptr;
  auto const start = std::chrono::steady_clock::now();
  LoadedKernel* made = nullptr;
  std::string failure;
  try {
    made = new LoadedKernel{compiler.compile(kernel_, device_, program_, types_), 0, staged_among(types_)};
  } catch (std::exception const& error) {
    failure = error.what();
  }
  {
    std::lock_guard const lock(mutex_);
    failure_ = std::move(failure);
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  loaded_.store(made, std::memory_order_release);
  is_pending_.store(false, std::memory_order_release);
  return made != nullptr;
}

std::string Specialization::failure() const {
  std::lock_guard const lock(mutex_);
  return failure_;
}

double Specialization::seconds() const {
  std::lock_guard const lock(mutex_);
  return seconds_;
}

LoadedKernel* loaded(Specialization const* specialization, Program const& program) {
  LoadedKernel* const found = specialization == nullptr ? nullptr : specialization->loaded();
  if (found == nullptr && has_eager_formulas(program)) {
    throw std::logic_error("no kernel interprets a program with PyTorch's own formulas");
  }
  return found;
}

Specialization* find_specialization(std::string_view kernel, int device, Program const& program,
                                    OperandTypes const& types) {
  if (program.chain != kNoChain) return nullptr;
  return registry().find(kernel, device, program, types);
}

Specialization* find_specialization(PointwiseProblem const& problem, int device) {
  Program const& program = problem.program;
  return find_alone(specialized_kernel(problem), device, program, types_of(program, problem.operands));
}

Specialization* find_specialization(PointwiseBackwardProblem const& problem, int device) {
  Program const& program = problem.program;
  return find_alone(specialized_kernel(problem), device, without_chain(program), types_of(program, problem.operands));
}

Specialization* find_specialization(ReduceProblem const& problem, int device) {
  std::string const kernel = specialized_kernel(problem);
  return find_alone(kernel, device, without_chain(problem.program), specialized_operands(problem));
}

void set_stalled(bool stalled) { stalled_now.store(stalled, std::memory_order_release); }

bool is_stalled() { return stalled_now.load(std::memory_order_acquire); }

size_t specialization_count() { return registry().size(); }

size_t compiled_count() { return registry().compiled(); }

void forget_specializations() { registry().forget(); }

OperandTypes epilogue_operand_types(GemmConfig const& config, Program const& program, Operands const& operands,
                                    int64_t columns) {
  OperandTypes types = {};
  for (int k = 0; k < program.operand_count; ++k) {
    Operand const& operand = operands.items[k];
    types[k] = {operand.dtype, kind_by_strides(operand)};
    bool const is_first = source_among(types) < 0;
    if (is_first && can_be_fetched(config, operand, columns)) types[k].kind = OperandKind::kSource;
  }
  return types;
}

std::string epilogue_kernel(LinearPlan const& plan, FusedProduct const& product) {
  GemmConfig const& config = config_of(product.kernel);
  Reduction const reduction = config.output == GemmOutput::kRows ? plan.request.reduction : Reduction::kNone;
  return variant_kernel(config.name, {plan.request.stores_pre_activation, reduction});
}

Specialization* find_epilogue(LinearPlan const& plan, FusedProduct const& product, int device, Program const& program,
                              Operands const& operands) {
  GemmConfig const& config = config_of(product.kernel);
  // Nothing is worth compiling in too, in the place of calls: 12608x3072x768 in bf16 takes 102 us with them, 87 without
  // and 89 in cuBLAS (H200). Of other products a call is a small part.
  if (program.length == 0 && product_of(config) != Product::kPlain) return nullptr;
  OperandTypes const types = epilogue_operand_types(config, program, operands, plan.request.weight.rows);
  // The kernel has its chain as a function, which takes longer.
  return find_specialization(epilogue_kernel(plan, product), device, without_chain(program), types);
}

}  // namespace cutfuse::specialize
