// What the versions and builds of Python have different, of reads that run no Python code. Everything that these give
// is a new reference, or null without an exception.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>

namespace cutfuse::call {

#if PY_VERSION_HEX < 0x030D0000
#define CUTFUSE_BEGIN_CRITICAL_SECTION(object) {
#define CUTFUSE_END_CRITICAL_SECTION() }
#else
#define CUTFUSE_BEGIN_CRITICAL_SECTION(object) Py_BEGIN_CRITICAL_SECTION(object)
#define CUTFUSE_END_CRITICAL_SECTION() Py_END_CRITICAL_SECTION()
#endif

// A counted reference.
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

// What a dict of Python's own type holds.
inline PyRef item_of(PyObject* dict, PyObject* key) {
  if (dict == nullptr || !PyDict_CheckExact(dict)) {
    return {};
  }
#if PY_VERSION_HEX < 0x030D0000
  PyObject* const found = PyDict_GetItemWithError(dict, key);
  Py_XINCREF(found);
#else
  PyObject* found = nullptr;
  PyDict_GetItemRef(dict, key, &found);
#endif
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
  }
  return PyRef::steal(found);
}

// A field of an object.
template <class T>
PyRef field_of(PyObject* owner, T* const& field) {
  PyObject* found = nullptr;
  CUTFUSE_BEGIN_CRITICAL_SECTION(owner);
  found = reinterpret_cast<PyObject*>(field);
  Py_XINCREF(found);
  CUTFUSE_END_CRITICAL_SECTION();
  (void)owner;
  return PyRef::steal(found);
}

// The object behind a weak reference.
inline PyRef target_of(PyObject* weak) {
#if PY_VERSION_HEX < 0x030D0000
  PyObject* const found = PyWeakref_GetObject(weak);
  return found == Py_None ? PyRef() : PyRef::share(found);
#else
  PyObject* found = nullptr;
  PyWeakref_GetRef(weak, &found);
  return PyRef::steal(found);
#endif
}

// An object's __dict__.
inline PyRef dict_of(PyObject* object) {
  PyRef found = PyRef::steal(PyObject_GenericGetDict(object, nullptr));
  if (!found) {
    PyErr_Clear();
  }
  return found;
}

// What a descriptor of C gives.
inline PyRef describe(PyObject* descriptor, PyObject* object) {
  PyRef found =
      PyRef::steal(Py_TYPE(descriptor)->tp_descr_get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object))));
  if (!found) {
    PyErr_Clear();
  }
  return found;
}

// 0 where a class has none.
inline uint32_t version_of(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030D0000
  if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) {
    return 0;
  }
#endif
  return __atomic_load_n(&type->tp_version_tag, __ATOMIC_ACQUIRE);
}

inline bool is_container(PyObject* value) {
  return PyDict_CheckExact(value) || PyODict_CheckExact(value) || PySet_CheckExact(value);
}

inline bool is_empty(PyObject* container) {
  return (PySet_Check(container) ? PySet_GET_SIZE(container) : PyDict_GET_SIZE(container)) == 0;
}

}  // namespace cutfuse::call
