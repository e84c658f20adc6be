#include "specialize/kernel_compiler.h"

#include <atomic>

namespace cutfuse::specialize {

namespace {

std::atomic<KernelCompiler*> in_use{nullptr};

}  // namespace

KernelCompiler& kernel_compiler() {
  KernelCompiler* const other = in_use.load(std::memory_order_acquire);
  return other == nullptr ? driver_compiler() : *other;
}

void use_kernel_compiler(KernelCompiler* other) { in_use.store(other, std::memory_order_release); }

}  // namespace cutfuse::specialize
