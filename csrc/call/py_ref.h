// A counted reference to a Python object.
#pragma once

#include <Python.h>

#include <utility>

namespace cutfuse::call {

class PyRef {
 public:
  PyRef() = default;
  PyRef(PyRef const& other) : object_(Py_XNewRef(other.object_)) {}
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PyRef() { Py_XDECREF(object_); }

  // Takes over a reference, as the C API's functions return them; null where they failed.
  static PyRef steal(PyObject* object) { return PyRef(object); }
  static PyRef share(PyObject* object) { return PyRef(Py_XNewRef(object)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit PyRef(PyObject* object) : object_(object) {}

  PyObject* object_ = nullptr;
};

}  // namespace cutfuse::call
