// Tensors that a call allocates, and launches into them.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "call/call_plan.h"
#include "call/torch_state.h"
#include "launch/launcher.h"

namespace cutfuse::call {

// A tensor and where it begins; no tensor, and an exception, where allocating it failed.
struct Memory {
  PyRef tensor;
  void* address = nullptr;
};

inline Memory located(PyRef tensor) {
  Memory memory = {std::move(tensor)};
  if (memory.tensor && !torch_state().read_address(memory.tensor.get(), memory.address)) return {};
  return memory;
}

inline Memory allocate(ResultLayout const& layout) {
  return located(torch_state().allocate(layout.sizes.get(), layout.strides.get(), layout.dtype.get()));
}

inline Memory allocate_bytes(PyRef const& sizes) { return located(torch_state().allocate_bytes(sizes.get())); }

// Makes launches while other threads run Python. False, with an exception, where one fails.
template <class Launches>
bool launch(Launches const& launches) {
  std::string refused;
  std::string failed;
  Py_BEGIN_ALLOW_THREADS;
  try {
    launches();
  } catch (std::invalid_argument const& error) {
    refused = error.what();
  } catch (std::exception const& error) {
    failed = error.what();
  }
  Py_END_ALLOW_THREADS;
  if (refused.empty() && failed.empty()) return true;
  if (!refused.empty()) {
    PyErr_SetString(PyExc_ValueError, refused.c_str());
  } else {
    PyErr_SetString(PyExc_RuntimeError, failed.c_str());
  }
  return false;
}

// The gradients of y = program(x, operands) by one kernel, and sums of them by one each: of x's over rows, and of those
// of operands that are broadcast.

struct SumMemory {
  Memory result;  // none where nothing is summed
  Memory workspace;
};

// What a plan's launches write.
struct ElementGradients {
  std::vector<Memory> outputs;  // as in the plan
  std::vector<SumMemory> sums;  // of each output
  Memory partials;
  SumMemory column_sum;
};

// Each allocates for launches below. False, with an exception, where that failed. inputs: x and the operands, in whose
// memory a plan may store gradients.
bool allocate_gradients(GradientSteps const& plan, PyObject* const* inputs, ElementGradients& gradients);
bool allocate_sum(GradientSum const& sum, SumMemory& memory);

// problem: that of the plan, with the addresses of what it reads.
void launch_gradients(GradientSteps const& plan, PointwiseBackwardProblem problem, ElementGradients const& gradients,
                      Stream stream);

// Of memory that is laid out as the sum's x.
void launch_sum(GradientSum const& sum, void const* data, SumMemory const& memory, Stream stream);

// The gradient that output k stands for: what was stored, or its sum.
PyRef take_gradient(ElementGradients& gradients, size_t k);

}  // namespace cutfuse::call
