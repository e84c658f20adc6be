// The arguments of a call, read: its key, and its tensors in their order.
#pragma once

#include <Python.h>

#include "call/call_plan.h"
#include "call/calls.h"
#include "epilogue/program.h"

namespace cutfuse::call {

// Of a callable whose number is to be asked for.
constexpr uint64_t kUnnumbered = ~uint64_t{0};

struct Arguments {
  // A gradient, x, the operands, a reduction's result and its ties are the most; so are a layer's with its planes,
  // and those of an MLP.
  static constexpr int kMaxTensors = 4 + kMaxOperands;

  CallKey key;
  int tensor_count = 0;
  int first_operand = 0;  // among the tensors; before it are x and, of a linear layer, weight and bias, or grad and x
  bool has_bias = false;
  PyObject* tensors[kMaxTensors];
  TensorFacts facts[kMaxTensors];
};

enum class Reading {
  kKeyed,    // the key is complete
  kGeneral,  // such a call has no plan
  kUnknown,  // the callable is not known yet
  kPlain,    // a linear layer that is PyTorch's own, whatever its key
};

// `given` has as many arguments as the function takes. Leaves no exception.
Reading read_arguments(Function function, PyObject* const* given, uint64_t callable, Arguments& arguments);

// How many positional arguments a function takes.
constexpr Py_ssize_t argument_count(Function function) {
  constexpr Py_ssize_t counts[] = {8, 4, 7, 11, 9, 4, 6, 6, 3};
  return counts[static_cast<int>(function)];
}

// Whether kernels may run with the tensors of a call: nobody watches PyTorch's calls, and no tensor is negated.
bool may_run_kernels(Function function, Arguments const& arguments);

}  // namespace cutfuse::call
