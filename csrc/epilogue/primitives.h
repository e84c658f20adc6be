// What the formulas of ops.def are written in: scalar fp32 functions, and what is called Primitives:: there, in two
// accuracies. And one functor per op, made of its row: its value and its derivatives with respect to each argument.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"
#include "epilogue/derivative.h"
#include "epilogue/ops.h"

namespace cutfuse::math {

// Scalar fp32 functions that ops.def is written in, the same on host and device. Each is within a few ulp, like
// PyTorch's own, and keeps that accuracy in the tails. On the device expf is one ex2 and seven plain instructions, so a
// sigmoid is two special-function operations.
//
// A value has to round alike wherever it is computed: interpreted, in straight-line code, on the host. So where a
// multiply-add is to be fused, the source says fmaf and does not leave a product and a sum to a compiler, which
// contracts some of them here and others there.

inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInverseLn2 = 1.4426950408889634f;
inline constexpr float kInverseLn10 = 0.4342944819032518f;
inline constexpr float kThird = 1.0f / 3.0f;
inline constexpr float kSixth = 1.0f / 6.0f;
inline constexpr float kSqrtHalf = 0.7071067811865476f;
inline constexpr float kTwoOverSqrtPi = 1.1283791670955126f;
inline constexpr float kInverseSqrtTwoPi = 0.3989422804014327f;
inline constexpr float kSeluScale = 1.0507009873554805f;
inline constexpr float kSeluAlpha = 1.6732632423543772f;

CUTFUSE_HOST_DEVICE float absolute(float x) { return ::fabsf(x); }

CUTFUSE_HOST_DEVICE float square(float x) { return x * x; }

CUTFUSE_HOST_DEVICE float sign(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f); }

// Propagates NaN, unlike fmaxf. Of zeros with different signs the host returns a, as PyTorch's relu and clamp do on
// CPUs, and the device +0, as they do there.
CUTFUSE_HOST_DEVICE float maximum(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || b != b ? b : a;
#endif
}

CUTFUSE_HOST_DEVICE float minimum(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || b != b ? b : a;
#endif
}

CUTFUSE_HOST_DEVICE float clamp(float x, float low, float high) { return minimum(maximum(x, low), high); }

// To the nearest of fewer bits, ties to even. NaN stays NaN.
CUTFUSE_HOST_DEVICE float round_to_bfloat16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b32 %0, {0, h}; }" : "=f"(result) : "f"(x));
  return result;
#else
  uint32_t const bits = to_bits(x);
  float const rounded = from_bits<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
  return x != x ? x : rounded;
#endif
}

// The same for fp16: 65520 and more is infinity, and below 2^-14 the last bit is 2^-24.
CUTFUSE_HOST_DEVICE float round_to_half(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(result) : "f"(x));
  return result;
#else
  float const magnitude = ::fabsf(x);
  if (!(magnitude < 65520.0f)) return x != x ? x : ::copysignf(HUGE_VALF, x);
  if (magnitude < 6.103515625e-05f) {
    float const volatile shifted = magnitude + 0.75f;  // its last bit is 2^-24
    return ::copysignf(shifted - 0.75f, x);
  }
  uint32_t const bits = to_bits(x);
  return from_bits<float>((bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu);
#endif
}

// 1 / x within 1 ulp for x >= 1, one instruction: no scaling, no slow path. A subnormal result is flushed to 0.
CUTFUSE_HOST_DEVICE float fast_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

CUTFUSE_HOST_DEVICE float reciprocal_square_root(float x) {
#if defined(__CUDA_ARCH__)
  return ::rsqrtf(x);
#else
  return 1.0f / ::sqrtf(x);
#endif
}

// A select that stays one. Out of a conditional expression nvcc makes a branch for each element: parts of the warp take
// it, and elements no longer overlap.
CUTFUSE_HOST_DEVICE float choose(bool condition, float yes, float no) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("{ .reg .pred p; setp.ne.s32 p, %3, 0; selp.f32 %0, %1, %2, p; }"
      : "=f"(result)
      : "f"(yes), "f"(no), "r"(static_cast<int>(condition)));
  return result;
#else
  return condition ? yes : no;
#endif
}

// a / b. The device's exact division branches for each element; this is a 2-ulp quotient over the full range and a
// Newton step: correctly rounded, but within 3 ulp where a, b or the quotient is near or below the smallest normal
// number. The step is dropped where it is not finite (zeros, infinities, ends of the range) or not needed (so a zero
// keeps its sign).
CUTFUSE_HOST_DEVICE float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  float const remainder = ::fmaf(-b, quotient, a);
  float const refined = ::fmaf(remainder, fast_reciprocal(b), quotient);
  bool const finite = absolute(refined) <= 3.402823466e38f;
  return choose(finite && remainder != 0.0f, refined, quotient);
#else
  return a / b;
#endif
}

// n / d of d in [1, inf], as a sigmoid divides, in seven instructions: rounded correctly but for a few d just below
// powers of 2. A quarter of d has a reciprocal that is not flushed. The remainder is negated, so that a zero keeps its
// sign, and is a number where n or d is infinite.
CUTFUSE_HOST_DEVICE float divide_by_one_or_more(float n, float d) {
#if defined(__CUDA_ARCH__)
  float const numerator = 0.25f * n, denominator = 0.25f * d;
  float const reciprocal = fast_reciprocal(denominator);
  float const quotient = numerator * reciprocal;
  float const remainder = ::fminf(::fmaf(denominator, quotient, -numerator), 3.402823466e38f);
  return ::fmaf(-remainder, reciprocal, quotient);
#else
  return n / d;
#endif
}

// a / b's way for the square root.
CUTFUSE_HOST_DEVICE float square_root(float x) {
#if defined(__CUDA_ARCH__)
  float const reciprocal = ::rsqrtf(x);
  float const root = x * reciprocal;
  float const refined = ::fmaf(::fmaf(-root, root, x), 0.5f * reciprocal, root);
  return choose(x == 0.0f || x > 3.402823466e38f, x, refined);
#else
  return ::sqrtf(x);
#endif
}

// ln(1 + x) of x in [0, inf], or NaN: log1pf's, whose branch for what is infinite or negative the compiler leaves out
// where it sees a number that is neither. With the branch, elements do not overlap.
CUTFUSE_HOST_DEVICE float logarithm_of_one_plus_positive(float x) {
#if defined(__CUDA_ARCH__)
  constexpr uint32_t kInfinite = 0x7F800000u;
  uint32_t const bits = to_bits(x);
  float const finite = ::log1pf(from_bits<float>(bits < kInfinite ? bits : kInfinite - 1));
  return choose(bits < kInfinite, finite, ::fmaf(x, INFINITY, INFINITY));
#else
  return ::log1pf(x);
#endif
}

// Flushes to 0 below -87.3, where the result would be subnormal (PyTorch's is 0 below -88.7).
CUTFUSE_HOST_DEVICE float sigmoid(float x) { return fast_reciprocal(1.0f + ::expf(-x)); }

// What follows works with u = exp(-|x|), which is in [0, 1]: no overflow, and no cancellation in the tails. Primitives
// is one of primitives.h.
template <class Primitives>
CUTFUSE_HOST_DEVICE float sigmoid_slope(float x) {
  float const u = Primitives::exponential(-absolute(x));
  float const r = fast_reciprocal(1.0f + u);
  return u * r * r;
}

CUTFUSE_HOST_DEVICE float hyperbolic_tangent(float x) {
  // Below 0.55, where 1 - 2u/(1+u) cancels: a minimax polynomial of (tanh(x) - x) / x^3 in x^2, relative error 1e-9.
  float const t = x * x;
  float p = ::fmaf(t, -0.006282472517341375f, 0.021077757701277733f);
  p = ::fmaf(t, p, -0.05385385826230049f);
  p = ::fmaf(t, p, 0.13332602381706238f);
  p = ::fmaf(t, p, -0.33333319425582886f);
  float const u = ::expf(-2.0f * absolute(x));
  float const large = ::fmaf(-2.0f * u, fast_reciprocal(1.0f + u), 1.0f);
  return ::copysignf(choose(absolute(x) < 0.55f, ::fmaf(x * t, p, x), large), x);
}

template <class Primitives>
CUTFUSE_HOST_DEVICE float hyperbolic_tangent_slope(float x) {
  float const u = Primitives::exponential(-2.0f * absolute(x));
  return 4.0f * u * square(fast_reciprocal(1.0f + u));
}

// a + weight * (b - a), from the end that is nearer.
CUTFUSE_HOST_DEVICE float lerp(float a, float b, float weight) {
  float const difference = b - a;
  float const from_a = ::fmaf(difference, weight, a);
  float const from_b = ::fmaf(-difference, 1.0f - weight, b);
  return choose(absolute(weight) < 0.5f, from_a, from_b);
}

// The derivative of copysign(x, y), whose value is `result`, as PyTorch computes it: NaN at infinities.
CUTFUSE_HOST_DEVICE float copysign_slope(float x, float result) {
  float const finite_slope = x == 0.0f ? 0.0f : (x == result ? 1.0f : -1.0f);
  return finite_slope + (result - result);
}

// PyTorch's remainder has the sign of b, C's that of a.
CUTFUSE_HOST_DEVICE bool has_other_sign(float remainder, float b) {
  return remainder != 0.0f && (b < 0.0f) != (remainder < 0.0f);
}

CUTFUSE_HOST_DEVICE float remainder(float a, float b) {
  float const exact = ::fmodf(a, b);
  return has_other_sign(exact, b) ? exact + b : exact;
}

// PyTorch's floor(a / b), from the exact remainder: 1 // 0.1f is 9, where the quotient rounds to 10.
CUTFUSE_HOST_DEVICE float floor_divide(float a, float b) {
  float const quotient = divide(a, b);
  float const exact = ::fmodf(a, b);
  float const whole = divide(a - exact, b) - (has_other_sign(exact, b) ? 1.0f : 0.0f);
  float const floored = ::floorf(whole);
  float const rounded = floored + (whole - floored > 0.5f ? 1.0f : 0.0f);
  if (b == 0.0f) return quotient;
  return whole == 0.0f ? ::copysignf(0.0f, quotient) : rounded;
}

// 1 / (a^2 + b^2), and 0 at the origin, where PyTorch's derivatives of atan2 are 0.
CUTFUSE_HOST_DEVICE float inverse_square_radius(float a, float b) {
  return a == 0.0f && b == 0.0f ? 0.0f : divide(1.0f, ::fmaf(a, a, b * b));
}

// Of the value y: NaN at infinities.
CUTFUSE_HOST_DEVICE float softsign_slope(float x, float y) {
  float const inverse = divide(1.0f, 1.0f + absolute(x));
  return ::fmaf(inverse, inverse, y - y);
}

// x * ln(y) by the logarithm.
CUTFUSE_HOST_DEVICE float times_logarithm(float x, float y, float logarithm) {
  return x == 0.0f && y == y ? 0.0f : x * logarithm;
}

CUTFUSE_HOST_DEVICE float entropy(float x) {
  float const inside = x == 0.0f ? 0.0f : -x * ::logf(x);
  return x < 0.0f ? -INFINITY : inside;
}

// A negative margin is none.
CUTFUSE_HOST_DEVICE float logit(float x, float margin) {
  float const inside = margin < 0.0f ? x : clamp(x, margin, 1.0f - margin);
  return ::logf(divide(inside, 1.0f - inside));
}

CUTFUSE_HOST_DEVICE MaskedDerivative logit_slope(float x, float margin) {
  float const low = margin < 0.0f ? 0.0f : margin;
  bool const outside = x < low || x > 1.0f - low;
  return masked(!outside || margin < 0.0f, outside ? NAN : divide(1.0f, x * (1.0f - x)));
}

template <class Primitives>
CUTFUSE_HOST_DEVICE float softplus(float x, float beta, float threshold) {
  float const t = x * beta;
  float const u = Primitives::exponential(-absolute(t));
  float const smooth = maximum(t, 0.0f) + Primitives::logarithm_of_one_plus_positive(u);
  return choose(t > threshold, x, Primitives::over_parameter(smooth, beta));
}

template <class Primitives>
CUTFUSE_HOST_DEVICE float logarithm_of_sigmoid(float x) {
  return minimum(x, 0.0f) - Primitives::logarithm_of_one_plus_positive(Primitives::exponential(-absolute(x)));
}

// tanh(softplus(x)) = n / (n + 2) with n = e^x (e^x + 2), scaled by u^2 where x is positive.
struct MishGate {
  float value;       // the gate
  float complement;  // 1 - value
};

template <class Primitives>
CUTFUSE_HOST_DEVICE MishGate mish_terms(float x) {
  float const u = Primitives::exponential(-absolute(x));
  float const n = x >= 0.0f ? 1.0f + 2.0f * u : u * (u + 2.0f);
  float const rest = x >= 0.0f ? 2.0f * u * u : 2.0f;
  float const r = fast_reciprocal(n + rest);
  return {n * r, rest * r};
}

template <class Primitives>
CUTFUSE_HOST_DEVICE float mish_gate(float x) {
  return mish_terms<Primitives>(x).value;
}

template <class Primitives>
CUTFUSE_HOST_DEVICE float mish_slope(float x) {
  MishGate const gate = mish_terms<Primitives>(x);
  float const sum = ::fmaf(gate.value, gate.complement, gate.complement);
  return ::fmaf(x * sum, Primitives::sigmoid(x), gate.value);
}

template <class Primitives>
CUTFUSE_HOST_DEVICE float gelu_slope(float x) {
  float const density = kInverseSqrtTwoPi * Primitives::exponential(-0.5f * x * x);
  return ::fmaf(x, density, Primitives::normal_distribution(x));
}

// (1 + tanh(v)) / 2 = sigmoid(2v), which spares the tanh; this is 2v = 2 sqrt(2/pi) (x + 0.044715 x^3).
CUTFUSE_HOST_DEVICE float gelu_tanh_argument(float x) {
  return x * ::fmaf(0.07135481282553784f * x, x, 1.5957691216057308f);
}

template <class Primitives>
CUTFUSE_HOST_DEVICE float gelu_tanh_slope(float x) {
  float const v = gelu_tanh_argument(x);
  float const dv = ::fmaf(0.21406443847661353f * x, x, 1.5957691216057308f);
  return ::fmaf(x * sigmoid_slope<Primitives>(v), dv, Primitives::sigmoid(v));
}

// ln(Phi(x) / Phi(-x)) / (x ln 2), where Phi is the distribution of the standard normal: a polynomial of x^2, fitted up
// to |x| = 5.6, where Phi(-x) is 1e-8. Beyond, it grows for ever, as its last coefficient is positive: no bound on x^2
// is needed.
CUTFUSE_HOST_DEVICE float normal_logit_over_x(float x) {
  float const t = x * x;
  float p = ::fmaf(t, 3.612995902457783e-09f, -2.9594752959383186e-07f);
  p = ::fmaf(t, p, 9.603613762010355e-06f);
  p = ::fmaf(t, p, -0.0001414876605849713f);
  p = ::fmaf(t, p, -0.00017824149108491838f);
  p = ::fmaf(t, p, 0.10500174760818481f);
  return ::fmaf(t, p, 2.3021111488342285f);
}

}  // namespace cutfuse::math

namespace cutfuse {

struct AccuratePrimitives {
  static CUTFUSE_HOST_DEVICE float exponential(float x) { return ::expf(x); }
  static CUTFUSE_HOST_DEVICE float sigmoid(float x) { return math::sigmoid(x); }
  static CUTFUSE_HOST_DEVICE float hyperbolic_tangent(float x) { return math::hyperbolic_tangent(x); }
  static CUTFUSE_HOST_DEVICE float normal_distribution(float x) { return 0.5f * (1.0f + ::erff(x * math::kSqrtHalf)); }
  static CUTFUSE_HOST_DEVICE float exponential_less_one(float x) { return ::expm1f(x); }
  static CUTFUSE_HOST_DEVICE float logarithm(float x) { return ::logf(x); }
  static CUTFUSE_HOST_DEVICE float logarithm_of_one_plus(float x) { return ::log1pf(x); }
  static CUTFUSE_HOST_DEVICE float logarithm_of_one_plus_positive(float x) {
    return math::logarithm_of_one_plus_positive(x);
  }
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
  static CUTFUSE_HOST_DEVICE float logarithm_of_one_plus_positive(float x) { return logarithm_of_one_plus(x); }
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

namespace ops {

#define CUTFUSE_OP_ARGUMENTS                                                                               \
  [[maybe_unused]] float a, [[maybe_unused]] float b, [[maybe_unused]] float c, [[maybe_unused]] float p0, \
      [[maybe_unused]] float p1
#define CUTFUSE_OP(Camel, name, arity, parameters, cost, fast, accurate, signature, aliases, forward_, eager, da, db, \
                   dc, formula, special)                                                                              \
  struct Camel {                                                                                                      \
    static constexpr int kArity = arity;                                                                              \
    static constexpr Cost kCost = Cost::k##cost;                                                                      \
    template <class Primitives>                                                                                       \
    static CUTFUSE_HOST_DEVICE float forward(CUTFUSE_OP_ARGUMENTS) {                                                  \
      return forward_;                                                                                                \
    }                                                                                                                 \
    template <class Primitives>                                                                                       \
    static CUTFUSE_HOST_DEVICE auto derivative_a(CUTFUSE_OP_ARGUMENTS, [[maybe_unused]] float y) {                    \
      return da;                                                                                                      \
    }                                                                                                                 \
    template <class Primitives>                                                                                       \
    static CUTFUSE_HOST_DEVICE auto derivative_b(CUTFUSE_OP_ARGUMENTS, [[maybe_unused]] float y) {                    \
      return db;                                                                                                      \
    }                                                                                                                 \
    template <class Primitives>                                                                                       \
    static CUTFUSE_HOST_DEVICE auto derivative_c(CUTFUSE_OP_ARGUMENTS, [[maybe_unused]] float y) {                    \
      return dc;                                                                                                      \
    }                                                                                                                 \
  };
#include "epilogue/ops.def"
#undef CUTFUSE_OP_ARGUMENTS

}  // namespace ops

}  // namespace cutfuse
