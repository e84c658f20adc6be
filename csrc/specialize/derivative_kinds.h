// What kind of derivative each op has with respect to each of its arguments, from the functors of ops.def.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/functors.h"

namespace cutfuse::specialize {

enum class DerivativeKind : uint8_t {
  kNone,    // nothing is propagated
  kFactor,  // a factor of the tangent
  kMasked,  // a factor where a mask passes the tangent
};

namespace detail {

template <class Derivative>
constexpr DerivativeKind kind_of() {
  if (std::is_same_v<Derivative, NoDerivative>) return DerivativeKind::kNone;
  return std::is_same_v<Derivative, float> ? DerivativeKind::kFactor : DerivativeKind::kMasked;
}

}  // namespace detail

inline constexpr DerivativeKind kDerivativeKinds[][3] = {
#define CUTFUSE_OP(Camel, ...)                                                                                    \
  {detail::kind_of<decltype(ops::Camel::derivative_a<AccuratePrimitives>(0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f))>(), \
   detail::kind_of<decltype(ops::Camel::derivative_b<AccuratePrimitives>(0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f))>(), \
   detail::kind_of<decltype(ops::Camel::derivative_c<AccuratePrimitives>(0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f))>()},
#include "epilogue/ops.def"
};

}  // namespace cutfuse::specialize
