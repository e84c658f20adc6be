// Op codes and the descriptions of ops, both generated from ops.def.
#pragma once

#include <cstdint>

namespace cutfuse {

enum class OpCode : uint8_t {
#define CUTFUSE_OP(Camel, ...) k##Camel,
#include "epilogue/ops.def"
};

// What an op costs, and how its code is laid out: see the cost column of ops.def.
enum class Cost { kLight, kSpecial, kHeavy, kRare };

// What an op's value takes where it is compiled into a kernel: see the columns fast and accurate of ops.def.
struct Work {
  int instructions;
  int special;

  constexpr Work(int given_instructions, int given_special)
      : instructions(given_instructions), special(given_special) {}
};

struct OpInfo {
  char const* name;
  int arity;
  int parameter_count;
  Cost cost;
  Work fast;
  Work accurate;
  char const* signature;
  char const* aliases;
  char const* eager;
  char const* formula;
  char const* special;
};

inline constexpr OpInfo kOps[] = {
#define CUTFUSE_OP(Camel, name, arity, parameters, cost, fast, accurate, signature, aliases, forward, eager, da, db, \
                   dc, formula, special)                                                                             \
  {#name, arity, parameters, Cost::k##cost, fast, accurate, signature, aliases, #eager, formula, special},
#include "epilogue/ops.def"
};

inline constexpr int kOpCount = sizeof(kOps) / sizeof(kOps[0]);
static_assert(kOpCount <= 255, "an instruction holds its op in one byte");

// Whether PyTorch's own formula is another one than the forward column's.
constexpr bool has_eager_formula(OpInfo const& op) { return op.eager[0] == '('; }

constexpr bool ordered_by_arity() {
  for (int code = 1; code < kOpCount; ++code) {
    if (kOps[code].arity < kOps[code - 1].arity) return false;
  }
  return true;
}
static_assert(ordered_by_arity(), "rows of ops.def are ordered by arity");

}  // namespace cutfuse
