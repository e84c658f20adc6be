// What has been asked for of specialized epilogues.
#pragma once

#include <optional>

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

}  // namespace cutfuse::specialize
