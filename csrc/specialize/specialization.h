// Kernels with a program compiled in: what is asked for of them, what compiles them, all of them in this process, and
// those of a linear layer's plan. Part of every build.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "common/loaded_kernel.h"
#include "epilogue/program.h"
#include "plan/gemm_configs.h"
#include "plan/linear_plan.h"
#include "pointwise/pointwise_plan.h"
#include "reduce/reduce_plan.h"
#include "specialize/kernel_variant.h"

namespace cutfuse::specialize {

enum class Mode {
  kOff,         // programs are interpreted
  kBackground,  // until they are compiled, by a thread that nobody waits for
  kNow,         // a first call waits for its kernel
};

constexpr int kModeCount = 3;

constexpr char const* name_of(Mode mode) {
  constexpr char const* names[kModeCount] = {"off", "background", "now"};
  return names[static_cast<int>(mode)];
}

// This thread's mode where it has one, and the process's elsewhere.
Mode mode();

Mode process_mode();
void set_process_mode(Mode mode);

// Empty: this thread follows the process.
std::optional<Mode> thread_mode();
void set_thread_mode(std::optional<Mode> mode);

class KernelCompiler {
 public:
  virtual ~KernelCompiler() = default;
  // Why it can compile nothing; empty where it can.
  virtual std::string why_not() const = 0;
  // The kernel with the program compiled in, loaded on the device, as cudaLaunchKernelExC takes it. Any thread may
  // call it, in which the device may be current afterwards. Throws std::runtime_error with the reason where it cannot
  // be had.
  virtual void const* compile(std::string_view kernel, int device, Program const& program,
                              OperandTypes const& types) = 0;
};

// The one of this build: the driver, or one that throws in a build without kernels.
KernelCompiler& driver_compiler();

// What compiles now: driver_compiler(), unless a test has put another in its place. Null puts it back.
KernelCompiler& kernel_compiler();
void use_kernel_compiler(KernelCompiler* other);

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

// What a launch of a program takes now: null where there is no specialization, or none yet. Throws std::logic_error
// where the program cannot be interpreted until then.
LoadedKernel* loaded(Specialization const* specialization, Program const& program);

// Specializations are kept for good, as their kernels are. So there is a limit of those that are asked for, which a
// program that keeps making up new chains would pass, and one of all, as explanations find some that nobody asks for.
constexpr size_t kMostSpecializations = 512;
constexpr size_t kMostKnown = 4096;

// The one specialization of these, made now if there is none yet. Null beyond the limits, and for a program that no
// kernel interprets: one without instructions, and one that the kernels have compiled in. GEMM kernels, and those that
// have no chain compiled in, are asked for with the program without its chain.
Specialization* find_specialization(std::string_view kernel, int device, Program const& program,
                                    OperandTypes const& types);

// The program of a problem in the kernel that specialized_kernel names; null where it has to be interpreted, too.
Specialization* find_specialization(PointwiseProblem const& problem, int device);
Specialization* find_specialization(PointwiseBackwardProblem const& problem, int device);
Specialization* find_specialization(ReduceProblem const& problem, int device);

// Whether specializations are queued that no thread compiles, because none could be started: a call that waits for one
// is to try again.
void set_stalled(bool stalled);
bool is_stalled();

size_t specialization_count();
// Those that are compiled.
size_t compiled_count();

// For tests: forgets all of them without freeing any.
void forget_specializations();

// How a kernel with a program compiled in takes the operands of an epilogue over [M, columns]. An address of 0 is one
// that is not known yet, and taken for aligned.
OperandTypes epilogue_operand_types(GemmConfig const& config, Program const& program, Operands const& operands,
                                    int64_t columns);

// The name of a product's kernel with a program compiled in.
std::string epilogue_kernel(LinearPlan const& plan, FusedProduct const& product);

// The program in that kernel, as find_specialization.
Specialization* find_epilogue(LinearPlan const& plan, FusedProduct const& product, int device, Program const& program,
                              Operands const& operands);

}  // namespace cutfuse::specialize
