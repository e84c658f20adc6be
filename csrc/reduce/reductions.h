// The reductions of reductions.def: what is known of each on the host, and how states fold and finish.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/host_device.h"
#include "epilogue/derivative.h"

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

// By code. On the device a look-up at run time would be a load: see dispatch_fold.
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

// How states fold and finish: the functions behind reductions.def. Shared by the standalone reductions, the row
// reduction of the GEMM epilogues and their finaliser. A state is two floats, so that it lives in registers and
// shuffles cheaply:
//
//   fold           a                 b                             of
//   Total          running total     rounding error of the total   sum, mean
//   Maximum        extreme so far    unused                        amax; Minimum likewise
//   Exponentials   maximum so far    sum of exp(x - a)             logsumexp      (see exponent_reference)
//
// NaN and infinity as PyTorch: sums follow IEEE, amax and amin propagate NaN, logsumexp of nothing but -inf is -inf, of
// anything with +inf is +inf, of anything with NaN is NaN.

struct RowState {
  float a;
  float b;
};

namespace detail {

// What exponents are taken relative to: the maximum, or 0 where it is infinite. Terms are then 0, infinite or NaN as
// IEEE arithmetic has it, and so is their sum, without a case for infinities at each element.
CUTFUSE_HOST_DEVICE float exponent_reference(float maximum) {
  float const infinity = std::numeric_limits<float>::infinity();
  return maximum == infinity || maximum == -infinity ? 0.0f : maximum;
}

// exp(x - reference). On the device two roundings of the argument: a relative error of about |x - reference| * 2^-24 on
// a term that weighs exp(x - reference), at most a few 1e-7 of the sum.
CUTFUSE_HOST_DEVICE float exp_relative(float x, float reference) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"((x - reference) * 1.4426950408889634f));
  return result;
#else
  return std::exp(x - reference);
#endif
}

// Knuth's two-sum: the total is rounded once and the rounding error is kept.
CUTFUSE_HOST_DEVICE void add_compensated(RowState& state, float x) {
  float const total = state.a + x;
  float const added = total - state.a;
  state.b += (state.a - (total - added)) + (x - added);
  state.a = total;
}

CUTFUSE_HOST_DEVICE float total_of(RowState state) {
  float const total = state.a + state.b;
  return total - total == 0.0f ? total : state.a;  // an infinite total has a NaN for its error
}

// Sum of values[begin, end) as a balanced tree, unrolled at compile time.
template <int begin, int end, class Values>
CUTFUSE_HOST_DEVICE float tree_sum(Values const& values) {
  if constexpr (end - begin == 1) {
    return values[begin];
  } else {
    constexpr int middle = (begin + end) / 2;
    return tree_sum<begin, middle>(values) + tree_sum<middle, end>(values);
  }
}

}  // namespace detail

// A fold has: kIdentity, the element that changes no state, which an out-of-bounds element is replaced with before
// accumulate; accumulate, which takes `count` values in, that anything with operator[] holds; combine; store and load
// of a partial result, of partial_width floats.
namespace folds {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Total {
  static constexpr float kIdentity = 0.0f;

  template <int count, class Values>
  static CUTFUSE_HOST_DEVICE void accumulate(RowState& state, Values const& values) {
    detail::add_compensated(state, detail::tree_sum<0, count>(values));
  }
  static CUTFUSE_HOST_DEVICE RowState combine(RowState x, RowState y) {
    detail::add_compensated(x, y.a);
    return {x.a, x.b + y.b};
  }
  static CUTFUSE_HOST_DEVICE void store(float* partials, int64_t index, RowState state) {
    partials[index] = detail::total_of(state);
  }
  static CUTFUSE_HOST_DEVICE RowState load(float const* partials, int64_t index) { return {partials[index], 0.0f}; }
};

// NaN propagates.
template <bool is_maximum>
struct Extreme {
  static constexpr float kIdentity = is_maximum ? -kInfinity : kInfinity;

  static CUTFUSE_HOST_DEVICE float choose(float x, float y) {
#if defined(__CUDA_ARCH__)
    float result;
    if constexpr (is_maximum) {
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    } else {
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    }
    return result;
#else
    return (is_maximum ? x > y : x < y) || x != x ? x : y;
#endif
  }

  template <int count, class Values>
  static CUTFUSE_HOST_DEVICE void accumulate(RowState& state, Values const& values) {
    CUTFUSE_UNROLL
    for (int i = 0; i < count; ++i) state.a = choose(state.a, values[i]);
  }
  static CUTFUSE_HOST_DEVICE RowState combine(RowState x, RowState y) { return {choose(x.a, y.a), 0.0f}; }
  static CUTFUSE_HOST_DEVICE void store(float* partials, int64_t index, RowState state) { partials[index] = state.a; }
  static CUTFUSE_HOST_DEVICE RowState load(float const* partials, int64_t index) { return {partials[index], 0.0f}; }
};

using Maximum = Extreme<true>;
using Minimum = Extreme<false>;

struct Exponentials {
  static constexpr float kIdentity = -kInfinity;

  template <int count, class Values>
  static CUTFUSE_HOST_DEVICE void accumulate(RowState& state, Values const& values) {
    float maximum = state.a;
    CUTFUSE_UNROLL
    for (int i = 0; i < count; ++i) maximum = Maximum::choose(maximum, values[i]);
    float const reference = detail::exponent_reference(maximum);
    float sum = ::fmaf(state.b, detail::exp_relative(state.a, reference), detail::exp_relative(values[0], reference));
    CUTFUSE_UNROLL
    for (int i = 1; i < count; ++i) sum += detail::exp_relative(values[i], reference);
    state = {maximum, sum};
  }
  static CUTFUSE_HOST_DEVICE RowState combine(RowState x, RowState y) {
    float const maximum = Maximum::choose(x.a, y.a);
    float const reference = detail::exponent_reference(maximum);
    float const of_x = rounded_product(x.b, detail::exp_relative(x.a, reference));
    float const of_y = rounded_product(y.b, detail::exp_relative(y.a, reference));
    return {maximum, of_x + of_y};
  }
  static CUTFUSE_HOST_DEVICE void store(float* partials, int64_t index, RowState state) {
    partials[2 * index] = state.a;
    partials[2 * index + 1] = state.b;
  }
  static CUTFUSE_HOST_DEVICE RowState load(float const* partials, int64_t index) {
    return {partials[2 * index], partials[2 * index + 1]};
  }
};

}  // namespace folds

// A row of reductions.def.
template <Reduction reduction>
struct ReductionRow;

#define CUTFUSE_REDUCTION(Camel, name, code, fold, finish_, gradient)                                        \
  template <>                                                                                                \
  struct ReductionRow<Reduction::k##Camel> {                                                                 \
    using Fold = folds::fold;                                                                                \
    static CUTFUSE_HOST_DEVICE float finish([[maybe_unused]] RowState state, [[maybe_unused]] float count) { \
      return finish_;                                                                                        \
    }                                                                                                        \
  };
#include "reduce/reductions.def"

template <Reduction reduction>
using FoldOf = typename ReductionRow<reduction>::Fold;

template <Reduction reduction_>
struct ReductionConstant {
  static constexpr Reduction value = reduction_;
};

// Calls function(ReductionConstant<r>) for the r that `reduction` is at run time. Until finish a mean is a sum, so
// `function` is instantiated once for each fold; finish_any tells them apart.
template <class Function>
CUTFUSE_HOST_DEVICE auto dispatch_fold(Reduction reduction, Function&& function) {
  switch (reduction) {
#define CUTFUSE_ADDITIVE_REDUCTION(...)
#define CUTFUSE_REDUCTION(Camel, ...) \
  case Reduction::k##Camel:           \
    return function(ReductionConstant<Reduction::k##Camel>{});
#include "reduce/reductions.def"
    default:
      return function(ReductionConstant<first_of(Fold::kTotal)>{});
  }
}

// The same with the reduction known at run time only: one uniform branch around each fragment. Each is a switch of its
// own over the rows: nvcc makes other code of a common one that calls a function, and of conditions that are functions.
CUTFUSE_HOST_DEVICE float identity_any(Reduction reduction) {
  switch (reduction) {
#define CUTFUSE_ADDITIVE_REDUCTION(Camel, ...) case Reduction::k##Camel:
#define CUTFUSE_REDUCTION(...)
#include "reduce/reductions.def"
    return folds::Total::kIdentity;
    default: {
      constexpr Reduction minimum = first_of(Fold::kMinimum);
      return reduction == minimum ? folds::Minimum::kIdentity : folds::Maximum::kIdentity;
    }
  }
}

CUTFUSE_HOST_DEVICE RowState initial_state_any(Reduction reduction) { return {identity_any(reduction), 0.0f}; }

template <int count, class Values>
CUTFUSE_HOST_DEVICE void accumulate_any(Reduction reduction, RowState& state, Values const& values) {
  switch (reduction) {
#define CUTFUSE_ADDITIVE_REDUCTION(...)
#define CUTFUSE_REDUCTION(Camel, ...) \
  case Reduction::k##Camel:           \
    return FoldOf<Reduction::k##Camel>::accumulate<count>(state, values);
#include "reduce/reductions.def"
    default:
      return folds::Total::accumulate<count>(state, values);
  }
}

CUTFUSE_HOST_DEVICE RowState combine_any(Reduction reduction, RowState x, RowState y) {
  switch (reduction) {
#define CUTFUSE_ADDITIVE_REDUCTION(...)
#define CUTFUSE_REDUCTION(Camel, ...) \
  case Reduction::k##Camel:           \
    return FoldOf<Reduction::k##Camel>::combine(x, y);
#include "reduce/reductions.def"
    default:
      return folds::Total::combine(x, y);
  }
}

CUTFUSE_HOST_DEVICE void store_partial_any(Reduction reduction, float* partials, int64_t index, RowState state) {
  constexpr Reduction exponentials = first_of(Fold::kExponentials);
  if (reduction == exponentials) {
    folds::Exponentials::store(partials, index, state);
    return;
  }
  switch (reduction) {
#define CUTFUSE_ADDITIVE_REDUCTION(Camel, ...) case Reduction::k##Camel:
#define CUTFUSE_REDUCTION(...)
#include "reduce/reductions.def"
    folds::Total::store(partials, index, state);
    return;
    default:
      folds::Maximum::store(partials, index, state);  // minima are stored alike
  }
}

// count: how many elements the whole reduction has; only the mean looks at it.
CUTFUSE_HOST_DEVICE float finish_any(Reduction reduction, RowState state, float count) {
  switch (reduction) {
#define CUTFUSE_REDUCTION(Camel, ...) \
  case Reduction::k##Camel:           \
    return ReductionRow<Reduction::k##Camel>::finish(state, count);
#include "reduce/reductions.def"
    default:
      return state.a;
  }
}

}  // namespace cutfuse
