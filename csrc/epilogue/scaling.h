// Programs that only scale: a sum of them needs no interpreter.
#pragma once

#include "epilogue/program.h"

namespace cutfuse {

// program(z) = scale * z, times operand `weight` where that is not negative.
struct Scaling {
  bool found;
  float scale;
  int weight;
};

// Finds prepared programs that multiply the previous result by numbers and at most one operand, in any order. Not where
// the numbers' product is no normal fp32 number: it may overflow or vanish where the products with z do not.
Scaling find_scaling(Program const& program);

}  // namespace cutfuse
