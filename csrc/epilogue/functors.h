// One functor per op, generated from ops.def: its value and its derivatives with respect to each argument.
#pragma once

#include "common/macros.h"
#include "epilogue/derivative.h"
#include "epilogue/ops.h"
#include "epilogue/primitives.h"

namespace cutfuse {

namespace ops {

#define CUTFUSE_OP(Camel, name, arity, parameters, cost, fast, accurate, signature, aliases, forward_, da, db, dc, \
                   formula, special)                                                                               \
  struct Camel {                                                                                                   \
    static constexpr int kArity = arity;                                                                           \
    static constexpr Cost kCost = Cost::k##cost;                                                                   \
    template <class Primitives>                                                                                    \
    static CUTFUSE_HOST_DEVICE float forward([[maybe_unused]] float a, [[maybe_unused]] float b,                   \
                                             [[maybe_unused]] float c, [[maybe_unused]] float p0,                  \
                                             [[maybe_unused]] float p1) {                                          \
      return forward_;                                                                                             \
    }                                                                                                              \
    template <class Primitives>                                                                                    \
    static CUTFUSE_HOST_DEVICE auto derivative_a([[maybe_unused]] float a, [[maybe_unused]] float b,               \
                                                 [[maybe_unused]] float c, [[maybe_unused]] float p0,              \
                                                 [[maybe_unused]] float p1, [[maybe_unused]] float y) {            \
      return da;                                                                                                   \
    }                                                                                                              \
    template <class Primitives>                                                                                    \
    static CUTFUSE_HOST_DEVICE auto derivative_b([[maybe_unused]] float a, [[maybe_unused]] float b,               \
                                                 [[maybe_unused]] float c, [[maybe_unused]] float p0,              \
                                                 [[maybe_unused]] float p1, [[maybe_unused]] float y) {            \
      return db;                                                                                                   \
    }                                                                                                              \
    template <class Primitives>                                                                                    \
    static CUTFUSE_HOST_DEVICE auto derivative_c([[maybe_unused]] float a, [[maybe_unused]] float b,               \
                                                 [[maybe_unused]] float c, [[maybe_unused]] float p0,              \
                                                 [[maybe_unused]] float p1, [[maybe_unused]] float y) {            \
      return dc;                                                                                                   \
    }                                                                                                              \
  };
#include "epilogue/ops.def"

}  // namespace ops
}  // namespace cutfuse
