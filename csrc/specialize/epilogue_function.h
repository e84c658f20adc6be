// A program as straight-line PTX: the body of the function that takes the place of run_epilogue in a kernel.
#pragma once

#include <string>

#include "epilogue/program.h"
#include "specialize/kernel_variant.h"
#include "specialize/op_snippets.h"
#include "specialize/program_writer.h"

namespace cutfuse::specialize {

// A thread's fragment: its elements, and how many a pass of a long program takes, which are those of one group of
// columns (sm90_epilogue_function.h).
constexpr int kFragment = 16;
constexpr int kPass = 4;
constexpr int kColumnsPerPass = 8;

// run_epilogue as a kernel's PTX has it. Its parameters are <name>_param_0 and so on: the address of EpilogueParams, m,
// n, the fragment, and in some kernels the source's; `result` is the parameter that takes the result.
struct EpilogueSignature {
  std::string name;
  std::string result;
  Primitives primitives;
  int source_words;  // of 4 bytes; 0 where there is no source
  bool is_staged;    // whether rows, columns and single elements are in shared memory: see sm90::EpilogueStorage
};

// What stands between the function's braces for a complete program, and for every other of the same structure
// (kernel_variant.h).
ProgramText write_epilogue_body(Program const& program, OperandTypes const& operands, OpSnippets const& snippets,
                                EpilogueSignature const& signature);

}  // namespace cutfuse::specialize
