#include "specialize/mode.h"

#include <atomic>

namespace cutfuse::specialize {

namespace {

std::atomic<Mode> of_process{Mode::kBackground};
thread_local std::optional<Mode> of_thread;

}  // namespace

Mode mode() { return of_thread ? *of_thread : process_mode(); }

Mode process_mode() { return of_process.load(std::memory_order_relaxed); }

void set_process_mode(Mode mode) { of_process.store(mode, std::memory_order_relaxed); }

std::optional<Mode> thread_mode() { return of_thread; }

void set_thread_mode(std::optional<Mode> mode) { of_thread = mode; }

}  // namespace cutfuse::specialize
