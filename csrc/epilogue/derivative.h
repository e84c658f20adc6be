// What the derivative columns of ops.def hold, and how a tangent passes one, so that forward mode gives the zeros,
// infinities and NaN of reverse mode, which is PyTorch's.
//
// PyTorch's backward functions multiply the gradient by a derivative, so that 0 * inf is NaN, or select it by a mask: a
// masked element gets 0 whatever the gradient is. Between the mask and the input they then multiply that 0. So a
// tangent has a zero of its own for "masked", -0, which infinite derivatives of later ops leave 0. A zero that came out
// of arithmetic is +0, and becomes NaN there. A mask makes -0 of a finite tangent and NaN of an infinite one.
//
// The modes still differ where several paths pass an infinite derivative: forward mode adds the tangents before it, and
// reverse mode the gradients behind it, so that terms of opposite sign or a masked one give inf in one and inf - inf or
// 0 * inf in the other. They differ too behind xlogy and xlog1py, whose backward functions take 0 * ln(x) for 0
// where ln(x) is infinite or NaN.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace cutfuse {

// A derivative that multiplies the gradient where `passes` is true; elsewhere the gradient is replaced by 0.
struct MaskedDerivative {
  bool passes;
  float factor;
};

// Of an argument to which PyTorch propagates nothing: those of comparisons and logical functions, and conditions.
struct NoDerivative {};

namespace math {

CUTFUSE_HOST_DEVICE MaskedDerivative masked(bool passes, float factor = 1.0f) { return {passes, factor}; }

CUTFUSE_HOST_DEVICE NoDerivative none() { return {}; }

}  // namespace math

// The tangent of numbers, of inputs that are not differentiated with respect to, and of what a mask replaced by 0.
inline constexpr float kMaskedTangent = -0.0f;

CUTFUSE_HOST_DEVICE bool is_masked(float tangent) { return to_bits(tangent) == 0x80000000u; }

// Rounded before anything is added to it, whatever a compiler would contract.
CUTFUSE_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

CUTFUSE_HOST_DEVICE float with_positive_zero(float x) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(x, 0.0f);
#else
  return x == 0.0f ? 0.0f : x;
#endif
}

// What an argument adds to the tangent of a result, by a tangent that is not masked. A zero that comes out of
// arithmetic, be it out of an underflow, becomes +0: so a tangent is masked only where a mask has been, which the
// generator of compiled derivatives relies on (specialize/derivative_writer.h).
CUTFUSE_HOST_DEVICE float unmasked_contribution(float derivative, float tangent) {
  return with_positive_zero(rounded_product(derivative, tangent));
}

// A masked element is 0 times the tangent: NaN where that is infinite.
CUTFUSE_HOST_DEVICE float unmasked_contribution(MaskedDerivative derivative, float tangent) {
  float const passed = unmasked_contribution(derivative.factor, tangent);
  float const masked = -::fabsf(tangent * 0.0f);
  return derivative.passes ? passed : masked;
}

CUTFUSE_HOST_DEVICE float unmasked_contribution(NoDerivative, float) { return kMaskedTangent; }

// The same by any tangent.
template <class Derivative>
CUTFUSE_HOST_DEVICE float contribution(Derivative derivative, float tangent) {
  return is_masked(tangent) ? tangent : unmasked_contribution(derivative, tangent);
}

// The gradient of an input: the incoming gradient times the program's tangent.
CUTFUSE_HOST_DEVICE float input_gradient(float gradient, float tangent) {
  return is_masked(tangent) ? 0.0f : rounded_product(gradient, tangent);
}

}  // namespace cutfuse
