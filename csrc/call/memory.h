// Tensors that a call allocates, and launches into them.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "call/call_plan.h"
#include "call/torch_state.h"

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

inline Operand presented(TensorLayout const& layout, void* data) {
  return {data, {layout.strides[0], layout.strides[1], layout.strides[2]}, layout.dtype};
}

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

}  // namespace cutfuse::call
