// What ops.def calls Primitives::, in two accuracies.
#pragma once

#include "common/macros.h"
#include "epilogue/scalar_math.h"

namespace cutfuse {

struct AccuratePrimitives {
  static CUTFUSE_HOST_DEVICE float exponential(float x) { return ::expf(x); }
  static CUTFUSE_HOST_DEVICE float sigmoid(float x) { return math::sigmoid(x); }
  static CUTFUSE_HOST_DEVICE float hyperbolic_tangent(float x) { return math::hyperbolic_tangent(x); }
  static CUTFUSE_HOST_DEVICE float normal_distribution(float x) { return 0.5f * (1.0f + ::erff(x * math::kSqrtHalf)); }
  static CUTFUSE_HOST_DEVICE float exponential_less_one(float x) { return ::expm1f(x); }
  static CUTFUSE_HOST_DEVICE float logarithm(float x) { return ::logf(x); }
  static CUTFUSE_HOST_DEVICE float logarithm_of_one_plus(float x) { return ::log1pf(x); }
  static CUTFUSE_HOST_DEVICE float error_function(float x) { return ::erff(x); }
  static CUTFUSE_HOST_DEVICE float quotient(float a, float b) { return math::divide(a, b); }
  static CUTFUSE_HOST_DEVICE float over_parameter(float a, float parameter) { return math::divide(a, parameter); }
  static CUTFUSE_HOST_DEVICE float hard_gated(float x) { return x * math::clamp(x + 3.0f, 0.0f, 6.0f) * math::kSixth; }
};

// Behind a product of 16-bit operands, whose rounding is 2^-12 at best, and between 16-bit tensors: the
// argument of ex2 is rounded once, for a relative error of |x| * 2^-24, 5e-6 at the ends of the range. A sigmoid is
// four instructions, two of them special functions, not eleven. The normal distribution is a sigmoid of a polynomial,
// 11 instructions and not 40: x times it is within 2e-8 and 1.6e-5 of its value. Functions that are 0 at 0 are the
// first terms of their series near it, and elsewhere made of special functions: within 8e-6 of their values, in 9 to 16
// instructions and not 14 to 29.
struct FastPrimitives {
  static CUTFUSE_HOST_DEVICE float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return ::exp2f(x);
#endif
  }
  static CUTFUSE_HOST_DEVICE float exponential(float x) { return power_of_two(x * math::kInverseLn2); }
  static CUTFUSE_HOST_DEVICE float sigmoid(float x) { return math::fast_reciprocal(1.0f + exponential(-x)); }
  static CUTFUSE_HOST_DEVICE float hyperbolic_tangent(float x) {
    float const small = ::fmaf(x * x * x, -math::kThird, x);
    float const u = exponential(-2.0f * math::absolute(x));
    float const large = ::fmaf(-2.0f * u, math::fast_reciprocal(1.0f + u), 1.0f);
    return ::copysignf(math::choose(math::absolute(x) < kSeriesEnd, small, large), x);
  }
  static CUTFUSE_HOST_DEVICE float normal_distribution(float x) {
    return math::fast_reciprocal(1.0f + power_of_two(-x * math::normal_logit_over_x(x)));
  }
  static CUTFUSE_HOST_DEVICE float exponential_less_one(float x) {
    float p = ::fmaf(x, 1.0f / 24.0f, math::kSixth);
    p = ::fmaf(x, p, 0.5f);
    float const small = x * ::fmaf(x, p, 1.0f);
    return math::choose(math::absolute(x) < 0.125f, small, exponential(x) - 1.0f);
  }
  static CUTFUSE_HOST_DEVICE float logarithm(float x) {
    float const near_one = series_of_logarithm(x - 1.0f);
    return math::choose(math::absolute(x - 1.0f) < kSeriesEnd, near_one, math::kLn2 * binary_logarithm(x));
  }
  static CUTFUSE_HOST_DEVICE float logarithm_of_one_plus(float x) {
    float const large = math::kLn2 * binary_logarithm(1.0f + x);
    return math::choose(math::absolute(x) < kSeriesEnd, series_of_logarithm(x), large);
  }
  // Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7 where x is positive.
  static CUTFUSE_HOST_DEVICE float error_function(float x) {
    constexpr float kTwoOverThreeSqrtPi = math::kTwoOverSqrtPi * math::kThird;
    float const magnitude = math::absolute(x);
    float const t = math::fast_reciprocal(::fmaf(magnitude, 0.3275911f, 1.0f));
    float p = ::fmaf(t, 1.061405429f, -1.453152027f);
    p = ::fmaf(t, p, 1.421413741f);
    p = ::fmaf(t, p, -0.284496736f);
    p = ::fmaf(t, p, 0.254829592f);
    float const large = ::fmaf(-t * p, exponential(-x * x), 1.0f);
    float const small = x * ::fmaf(x * x, -kTwoOverThreeSqrtPi, math::kTwoOverSqrtPi);
    return math::choose(magnitude < kSeriesEnd, small, ::copysignf(large, x));
  }
  // Within 2 ulp.
  static CUTFUSE_HOST_DEVICE float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a / b;
#endif
  }
  // Of a parameter of an op, whose reciprocal is that of all elements.
  static CUTFUSE_HOST_DEVICE float over_parameter(float a, float parameter) {
    return a * math::fast_reciprocal(parameter);
  }
  // Two instructions and not five, within 1e-7 and 1 ulp. What saturates takes NaN to 0, which times NaN is NaN.
  static CUTFUSE_HOST_DEVICE float hard_gated(float x) {
    float const gate = ::fmaf(x, math::kSixth, 0.5f);
#if defined(__CUDA_ARCH__)
    return x * __saturatef(gate);
#else
    return x * (gate > 0.0f ? (gate < 1.0f ? gate : 1.0f) : 0.0f);
#endif
  }

 private:
  static constexpr float kSeriesEnd = 0.0625f;

  // ln(1 + x) for |x| below kSeriesEnd, within 3e-6 of its value.
  static CUTFUSE_HOST_DEVICE float series_of_logarithm(float x) {
    float p = ::fmaf(x, -0.25f, math::kThird);
    p = ::fmaf(x, p, -0.5f);
    return x * ::fmaf(x, p, 1.0f);
  }
  static CUTFUSE_HOST_DEVICE float binary_logarithm(float x) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return ::log2f(x);
#endif
  }
};

}  // namespace cutfuse
