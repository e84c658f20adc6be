// The values that a walk through the tree of observations has found so far.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

#include "call/observations.h"
#include "call/python_objects.h"

namespace cutfuse::call {

class WalkSlots {
 public:
  WalkSlots(WalkSlots const&) = delete;
  WalkSlots& operator=(WalkSlots const&) = delete;

 protected:
  WalkSlots() = default;

  ~WalkSlots() {
    for (int k = 0; k < count_; ++k) {
      Py_DECREF(slots_[k].value);
      Py_XDECREF(slots_[k].function);
    }
  }

  struct Slot {
    PyObject* value;
    PyObject* function;  // whose reads are the value's: itself, or the forward of a module
  };

  static PyFunctionObject* as_function(PyObject* object) { return reinterpret_cast<PyFunctionObject*>(object); }

  PyObject* value(Node const& node) const { return slots_[node.slot].value; }
  PyObject* function(Node const& node) const { return slots_[node.slot].function; }

  // For as long as the walk takes. With a GIL its owner holds it: no other thread runs. Without one this may be the
  // last reference, and what its end runs cannot run under the lock.
  PyObject* hold(Reference reference) {
    PyObject* const object = reference.get();
#ifdef Py_GIL_DISABLED
    held_.push_back(std::move(reference));
#endif
    return object;
  }

  template <class T>
  PyObject* field(PyObject* owner, T* const& field) {
    return hold(field_of(owner, field));
  }

  bool push(PyObject* value) {
    if (value == nullptr || count_ == kSlotsLimit) {
      return false;
    }
    Py_INCREF(value);
    slots_[count_++] = {value, nullptr};
    return true;
  }

  void set_function(Node const& node, PyObject* function) {
    Py_INCREF(function);
    slots_[node.slot].function = function;
  }

#ifdef Py_GIL_DISABLED
  std::vector<Reference> held_;
#endif
  int count_ = 0;
  Slot slots_[kSlotsLimit];
};

}  // namespace cutfuse::call
