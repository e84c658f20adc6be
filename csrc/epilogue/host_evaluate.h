// The interpreter on the host: what the kernels compute, on a machine without a GPU.
#pragma once

#include <cstdint>

#include "epilogue/program.h"

namespace cutfuse {

// An fp32 operand on the host: one number for all elements (stride 0) or one for each (stride 1).
struct HostOperand {
  float const* data;
  int64_t stride;
};

// output[i] is the program's value at input[i] (wrt = -1), or its derivative with respect to the input (wrt = 0) or
// operand wrt - 1. The program has to be well formed, and operands holds its operand_count of them.
void host_evaluate(Program const& program, float const* input, float* output, int64_t count,
                   HostOperand const* operands, int wrt);

}  // namespace cutfuse
