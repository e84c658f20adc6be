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

// A strong reference.
class Reference {
 public:
  Reference() = default;
  explicit Reference(PyObject* owned) : object_(owned) {}
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference& operator=(Reference&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }

  static Reference to(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Reference(borrowed);
  }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// What a dict of Python's own type holds.
inline Reference item_of(PyObject* dict, PyObject* key) {
  if (dict == nullptr || !PyDict_CheckExact(dict)) {
    return Reference();
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
  return Reference(found);
}

// A field of an object.
template <class T>
Reference field_of(PyObject* owner, T* const& field) {
  PyObject* found = nullptr;
  CUTFUSE_BEGIN_CRITICAL_SECTION(owner);
  found = reinterpret_cast<PyObject*>(field);
  Py_XINCREF(found);
  CUTFUSE_END_CRITICAL_SECTION();
  (void)owner;
  return Reference(found);
}

// The object behind a weak reference.
inline Reference target_of(PyObject* weak) {
#if PY_VERSION_HEX < 0x030D0000
  PyObject* const found = PyWeakref_GetObject(weak);
  return found == Py_None ? Reference() : Reference::to(found);
#else
  PyObject* found = nullptr;
  PyWeakref_GetRef(weak, &found);
  return Reference(found);
#endif
}

// An object's __dict__.
inline Reference dict_of(PyObject* object) {
  Reference found(PyObject_GenericGetDict(object, nullptr));
  if (!found) {
    PyErr_Clear();
  }
  return found;
}

// What a descriptor of C gives.
inline Reference describe(PyObject* descriptor, PyObject* object) {
  Reference found(Py_TYPE(descriptor)->tp_descr_get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object))));
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
