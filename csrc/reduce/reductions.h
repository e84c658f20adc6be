// The table of reductions: identity, accumulate, combine, finish. Shared by the standalone reductions, the row
// reduction of the GEMM epilogues and their finaliser. A state is two floats, so that it lives in registers and
// shuffles cheaply:
//
//   reduction    a                 b                                    finish(count)
//   sum, mean    running total     rounding error of the total          a + b, over count for the mean
//   amax, amin   extreme so far    unused                               a
//   logsumexp    maximum so far    sum of exp(x - a)                    a + log(b)      (see exponent_reference)
//
// NaN and infinity as PyTorch: sums follow IEEE, amax and amin propagate NaN, logsumexp of nothing but -inf is -inf, of
// anything with +inf is +inf, of anything with NaN is NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/macros.h"
#include "epilogue/program.h"

namespace cutfuse {

struct RowState {
  float a;
  float b;
};

namespace detail {

CUTFUSE_HOST_DEVICE float maximum_with_nan(float x, float y) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return (x > y || x != x) ? x : y;
#endif
}

CUTFUSE_HOST_DEVICE float minimum_with_nan(float x, float y) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return (x < y || x != x) ? x : y;
#endif
}

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

constexpr bool is_additive(Reduction reduction) {
  return reduction == Reduction::kSum || reduction == Reduction::kMean;
}

// The element that changes no state: what an out-of-bounds element is replaced with before accumulate.
template <Reduction reduction>
CUTFUSE_HOST_DEVICE constexpr float identity() {
  if constexpr (is_additive(reduction)) {
    return 0.0f;
  } else if constexpr (reduction == Reduction::kAmin) {
    return std::numeric_limits<float>::infinity();
  } else {
    return -std::numeric_limits<float>::infinity();
  }
}

template <Reduction reduction>
CUTFUSE_HOST_DEVICE RowState initial_state() {
  return {identity<reduction>(), 0.0f};
}

// Takes `count` values in; anything with operator[] holds them.
template <Reduction reduction, int count, class Values>
CUTFUSE_HOST_DEVICE void accumulate(RowState& state, Values const& values) {
  if constexpr (is_additive(reduction)) {
    detail::add_compensated(state, detail::tree_sum<0, count>(values));
  } else if constexpr (reduction == Reduction::kAmax) {
    CUTFUSE_UNROLL
    for (int i = 0; i < count; ++i) state.a = detail::maximum_with_nan(state.a, values[i]);
  } else if constexpr (reduction == Reduction::kAmin) {
    CUTFUSE_UNROLL
    for (int i = 0; i < count; ++i) state.a = detail::minimum_with_nan(state.a, values[i]);
  } else {
    float maximum = state.a;
    CUTFUSE_UNROLL
    for (int i = 0; i < count; ++i) maximum = detail::maximum_with_nan(maximum, values[i]);
    float const reference = detail::exponent_reference(maximum);
    float sum = state.b * detail::exp_relative(state.a, reference);
    CUTFUSE_UNROLL
    for (int i = 0; i < count; ++i) sum += detail::exp_relative(values[i], reference);
    state = {maximum, sum};
  }
}

template <Reduction reduction>
CUTFUSE_HOST_DEVICE RowState combine(RowState x, RowState y) {
  if constexpr (is_additive(reduction)) {
    detail::add_compensated(x, y.a);
    return {x.a, x.b + y.b};
  } else if constexpr (reduction == Reduction::kAmax) {
    return {detail::maximum_with_nan(x.a, y.a), 0.0f};
  } else if constexpr (reduction == Reduction::kAmin) {
    return {detail::minimum_with_nan(x.a, y.a), 0.0f};
  } else {
    float const maximum = detail::maximum_with_nan(x.a, y.a);
    float const reference = detail::exponent_reference(maximum);
    return {maximum, x.b * detail::exp_relative(x.a, reference) + y.b * detail::exp_relative(y.a, reference)};
  }
}

// count: how many elements the whole reduction has; only the mean looks at it.
template <Reduction reduction>
CUTFUSE_HOST_DEVICE float finish(RowState state, float count) {
  if constexpr (reduction == Reduction::kMean) {
    return detail::total_of(state) / count;
  } else if constexpr (reduction == Reduction::kSum) {
    return detail::total_of(state);
  } else if constexpr (reduction == Reduction::kLogSumExp) {
    return state.a + std::log(state.b);
  } else {
    return state.a;
  }
}

// Floats that one partial result takes in a workspace: (maximum, sum) for logsumexp, one value for the others.
constexpr int partial_width(Reduction reduction) { return reduction == Reduction::kLogSumExp ? 2 : 1; }

template <Reduction reduction>
CUTFUSE_HOST_DEVICE void store_partial(float* partials, int64_t index, RowState state) {
  if constexpr (reduction == Reduction::kLogSumExp) {
    partials[2 * index] = state.a;
    partials[2 * index + 1] = state.b;
  } else {
    partials[index] = is_additive(reduction) ? detail::total_of(state) : state.a;
  }
}

template <Reduction reduction>
CUTFUSE_HOST_DEVICE RowState load_partial(float const* partials, int64_t index) {
  if constexpr (reduction == Reduction::kLogSumExp) {
    return {partials[2 * index], partials[2 * index + 1]};
  } else {
    return {partials[index], 0.0f};
  }
}

template <Reduction reduction_>
struct ReductionConstant {
  static constexpr Reduction value = reduction_;
};

// Calls function(ReductionConstant<r>) for the r that `reduction` is at run time. Until finish a mean is a sum, so
// `function` is instantiated for the four kinds of state only; finish_any tells them apart.
template <class Function>
CUTFUSE_HOST_DEVICE auto dispatch_state(Reduction reduction, Function&& function) {
  switch (reduction) {
    case Reduction::kAmax:
      return function(ReductionConstant<Reduction::kAmax>{});
    case Reduction::kAmin:
      return function(ReductionConstant<Reduction::kAmin>{});
    case Reduction::kLogSumExp:
      return function(ReductionConstant<Reduction::kLogSumExp>{});
    default:
      return function(ReductionConstant<Reduction::kSum>{});
  }
}

// The same table with the reduction known at run time only: one uniform branch around each fragment.
CUTFUSE_HOST_DEVICE float identity_any(Reduction reduction) {
  if (reduction == Reduction::kSum || reduction == Reduction::kMean) return 0.0f;
  float const infinity = std::numeric_limits<float>::infinity();
  return reduction == Reduction::kAmin ? infinity : -infinity;
}

CUTFUSE_HOST_DEVICE RowState initial_state_any(Reduction reduction) { return {identity_any(reduction), 0.0f}; }

template <int count, class Values>
CUTFUSE_HOST_DEVICE void accumulate_any(Reduction reduction, RowState& state, Values const& values) {
  switch (reduction) {
    case Reduction::kAmax:
      return accumulate<Reduction::kAmax, count>(state, values);
    case Reduction::kAmin:
      return accumulate<Reduction::kAmin, count>(state, values);
    case Reduction::kLogSumExp:
      return accumulate<Reduction::kLogSumExp, count>(state, values);
    default:
      return accumulate<Reduction::kSum, count>(state, values);
  }
}

CUTFUSE_HOST_DEVICE RowState combine_any(Reduction reduction, RowState x, RowState y) {
  switch (reduction) {
    case Reduction::kAmax:
      return combine<Reduction::kAmax>(x, y);
    case Reduction::kAmin:
      return combine<Reduction::kAmin>(x, y);
    case Reduction::kLogSumExp:
      return combine<Reduction::kLogSumExp>(x, y);
    default:
      return combine<Reduction::kSum>(x, y);
  }
}

CUTFUSE_HOST_DEVICE void store_partial_any(Reduction reduction, float* partials, int64_t index, RowState state) {
  if (reduction == Reduction::kLogSumExp) {
    store_partial<Reduction::kLogSumExp>(partials, index, state);
  } else if (reduction == Reduction::kSum || reduction == Reduction::kMean) {
    store_partial<Reduction::kSum>(partials, index, state);
  } else {
    store_partial<Reduction::kAmax>(partials, index, state);
  }
}

CUTFUSE_HOST_DEVICE float finish_any(Reduction reduction, RowState state, float count) {
  switch (reduction) {
    case Reduction::kMean:
      return finish<Reduction::kMean>(state, count);
    case Reduction::kSum:
      return finish<Reduction::kSum>(state, count);
    case Reduction::kLogSumExp:
      return finish<Reduction::kLogSumExp>(state, count);
    default:
      return state.a;
  }
}

}  // namespace cutfuse
