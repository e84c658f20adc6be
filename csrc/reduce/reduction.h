// Reductions and what is known of each on the host, from reductions.def.
#pragma once

#include <cstdint>

namespace cutfuse {

enum class Reduction : uint8_t {
  kNone = 0,
#define CUTFUSE_REDUCTION(Camel, name, code, fold, finish, gradient) k##Camel = (code),
#include "reduce/reductions.def"
};

// See the columns of reductions.def.
enum class Fold : uint8_t { kNone, kTotal, kMaximum, kMinimum, kExponentials };
enum class ReductionGradient : uint8_t { kOne, kShare, kTies, kSoftmax };

constexpr char const* name_of(ReductionGradient gradient) {
  constexpr char const* names[] = {"one", "share", "ties", "softmax"};
  return names[static_cast<int>(gradient)];
}

struct ReductionInfo {
  char const* name;
  Reduction code;
  Fold fold;
  ReductionGradient gradient;
};

// By code. On the device a look-up at run time would be a load: see reductions.h.
inline constexpr ReductionInfo kReductions[] = {
    {"none", Reduction::kNone, Fold::kNone, ReductionGradient::kOne},
#define CUTFUSE_REDUCTION(Camel, name, code, fold, finish, gradient) \
  {#name, Reduction::k##Camel, Fold::k##fold, ReductionGradient::k##gradient},
#include "reduce/reductions.def"
};

inline constexpr int kReductionCount = sizeof(kReductions) / sizeof(kReductions[0]);

constexpr ReductionInfo const& info_of(Reduction reduction) { return kReductions[static_cast<int>(reduction)]; }

constexpr char const* name_of(Reduction reduction) { return info_of(reduction).name; }

// Whether a factor may be taken out of it, and partial results be added.
constexpr bool is_additive(Reduction reduction) { return info_of(reduction).fold == Fold::kTotal; }

// Floats that one partial result takes in a workspace: (maximum, sum) for logsumexp, one value for the others.
constexpr int partial_width(Reduction reduction) { return info_of(reduction).fold == Fold::kExponentials ? 2 : 1; }

// Whether gradients depend on the result, and on how many elements equal it.
constexpr bool counts_ties(Reduction reduction) { return info_of(reduction).gradient == ReductionGradient::kTies; }
constexpr bool needs_result(Reduction reduction) {
  return counts_ties(reduction) || info_of(reduction).gradient == ReductionGradient::kSoftmax;
}

// The first reduction of a fold: the only one, but for Total.
constexpr Reduction first_of(Fold fold) {
  int code = 0;
  while (kReductions[code].fold != fold) ++code;
  return kReductions[code].code;
}

constexpr bool is_well_formed() {
  for (int code = 0; code < kReductionCount; ++code) {
    ReductionInfo const& info = kReductions[code];
    if (static_cast<int>(info.code) != code) return false;
    if (info.fold != Fold::kTotal && first_of(info.fold) != info.code) return false;
  }
  return true;
}
static_assert(is_well_formed(), "rows of reductions.def are ordered by code, and share no fold but Total");

}  // namespace cutfuse
