#include "specialize/specialization.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <unordered_map>
#include <utility>

#include "specialize/program_structure.h"

namespace cutfuse::specialize {

namespace {

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

}  // namespace

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

Specialization* find_specialization(std::string_view kernel, int device, Program const& program,
                                    OperandTypes const& types) {
  if (!is_interpreted(program)) return nullptr;
  return registry().find(kernel, device, program, types);
}

namespace {
std::atomic<bool> stalled_now = false;
}  // namespace

void set_stalled(bool stalled) { stalled_now.store(stalled, std::memory_order_release); }

bool is_stalled() { return stalled_now.load(std::memory_order_acquire); }

size_t specialization_count() { return registry().size(); }

size_t compiled_count() { return registry().compiled(); }

void forget_specializations() { registry().forget(); }

}  // namespace cutfuse::specialize
