// The steps of a trail, see cutfuse/epilogue/fingerprint.py.
#pragma once

#include <Python.h>

#include <vector>

#include "call/observations.h"

namespace cutfuse::call {

// A step of a trail.
struct Step {
  Node node;  // without edges
  Edge edge;
};

enum class Parsed { kSteps, kInexpressible, kError };  // after an error an exception is set

Parsed parse_trail(PyObject* trail, std::vector<Step>& steps);

}  // namespace cutfuse::call
