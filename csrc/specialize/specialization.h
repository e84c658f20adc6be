// A kernel with a program compiled in, and all of them in this process. Part of every build.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>

#include "common/loaded_kernel.h"
#include "epilogue/program.h"
#include "specialize/kernel_compiler.h"
#include "specialize/operand_types.h"

namespace cutfuse::specialize {

// A program in a kernel, on one device. It serves every program that differs in numbers alone.
class Specialization {
 public:
  Specialization(std::string kernel, int device, Program const& program, OperandTypes const& types)
      : kernel_(std::move(kernel)), device_(device), program_(program), types_(types) {}

  std::string const& kernel() const { return kernel_; }
  int device() const { return device_; }
  int operand_count() const { return program_.operand_count; }
  OperandTypes const& operand_types() const { return types_; }

  // True for the first who asks, and who is to have the kernel compiled.
  bool claim() { return !is_claimed_.exchange(true); }
  bool is_claimed() const { return is_claimed_.load(); }

  // Null until the kernel is compiled, and for good where that failed. Any thread may ask at any time.
  LoadedKernel* loaded() const { return loaded_.load(std::memory_order_acquire); }

  // Whether compiling has been neither done nor tried.
  bool is_pending() const { return is_pending_.load(std::memory_order_acquire); }

  // Compiles the kernel, unless that has been done or tried. Takes the driver some 0.3 s where its cache has no such
  // kernel. Returns whether the kernel is there now.
  bool compile(KernelCompiler& compiler);

  // Why the kernel could not be compiled; empty before that, and where it could.
  std::string failure() const;
  // What compiling took; 0 before.
  double seconds() const;

 private:
  std::string const kernel_;
  int const device_;
  Program const program_;
  OperandTypes const types_;
  std::atomic<LoadedKernel*> loaded_ = nullptr;  // never freed: plans, streams and graphs may still launch it
  std::atomic<bool> is_claimed_ = false;
  std::mutex compiling_;
  std::atomic<bool> is_pending_ = true;
  mutable std::mutex mutex_;  // of what follows; never held while something is compiled
  std::string failure_;
  double seconds_ = 0.0;
};

// What a launch takes now: null where there is no specialization, or none yet.
inline LoadedKernel* loaded(Specialization const* specialization) {
  return specialization == nullptr ? nullptr : specialization->loaded();
}

// Specializations are kept for good, as their kernels are. So there is a limit of those that are asked for, which a
// program that keeps making up new chains would pass, and one of all, as explanations find some that nobody asks for.
constexpr size_t kMostSpecializations = 512;
constexpr size_t kMostKnown = 4096;

// The one specialization of these, made now if there is none yet. Null beyond the limits, and for a program that no
// kernel interprets: one without instructions, and one that the kernels have compiled in. GEMM kernels, and those that
// have no chain compiled in, are asked for with the program without its chain.
Specialization* find_specialization(std::string_view kernel, int device, Program const& program,
                                    OperandTypes const& types);

// Whether specializations are queued that no thread compiles, because none could be started: a call that waits for one
// is to try again.
void set_stalled(bool stalled);
bool is_stalled();

size_t specialization_count();
// Those that are compiled.
size_t compiled_count();

// For tests: forgets all of them without freeing any.
void forget_specializations();

}  // namespace cutfuse::specialize
