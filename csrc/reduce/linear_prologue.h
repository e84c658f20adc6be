// Programs that only scale: a sum of them needs no interpreter.
#pragma once

#include "epilogue/program.h"

namespace cutfuse {

// program(z) = scale * z, times operand `weight` where that is not negative.
struct LinearPrologue {
  bool found;
  float scale;
  int weight;
};

// Finds chains of products of the previous result with numbers and at most one operand.
LinearPrologue find_linear_prologue(Program const& program);

}  // namespace cutfuse
