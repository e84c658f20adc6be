// Reads a callable as the tree of observations says.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

#include "call/observations.h"
#include "call/python_objects.h"

namespace cutfuse::call {

// The values that a walk through the tree of observations has found so far.

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
  PyObject* hold(PyRef&& reference) {
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
  std::vector<PyRef> held_;
#endif
  int count_ = 0;
  Slot slots_[kSlotsLimit];
};

inline PyTypeObject* partial_type = nullptr;
inline PyTypeObject* epilogue_type = nullptr;
// Set by learn_types. Descriptors of partial, which are C's.
inline PyObject* partial_function = nullptr;
inline PyObject* partial_arguments = nullptr;
inline PyObject* partial_keywords = nullptr;
inline PyObject* name_expression = nullptr;
inline PyObject* name_operand_count = nullptr;
inline PyObject* name_modules = nullptr;
inline PyObject* name_parameters = nullptr;
inline PyObject* name_buffers = nullptr;
inline PyObject* name_forward = nullptr;

// A walk through the tree: the values found so far, and the reads of them.
class Walk : private WalkSlots {
 public:
  explicit Walk(PyObject* callable) { push(callable); }

  // The edge that belongs to what a node reads now; null where there is none.
  Edge* follow(Node& node) {
    switch (node.read) {
      case Read::kValue:
        return follow_value(node);
      case Read::kCode:
        return follow_same(node, field(value(node), as_function(value(node))->func_code));
      case Read::kDefaultValues:
        return follow_same(node, field(value(node), as_function(value(node))->func_defaults));
      case Read::kQualname:
        return follow_qualname(node);
      case Read::kGlobal:
        return follow_chain(node, read_global(node));
      case Read::kFree:
        return follow_chain(node, read_free(node));
      case Read::kDefaults:
        return follow_defaults(node);
      case Read::kKeywordDefaults:
        return follow_items(node, field(function(node), as_function(function(node))->func_kwdefaults));
      case Read::kKeywords:
        return follow_items(node, hold(describe(partial_keywords, value(node))));
      case Read::kHooks:
        return has_hooks(node.argument.get()) ? nullptr : node.find(whole(Answer::kNone, 0));
      case Read::kAttributes:
        return follow_attributes(node);
      case Read::kForward:
        return follow_forward(node);
      case Read::kAttribute:
        return follow_attribute(node);
      case Read::kEnd:
        break;
    }
    return nullptr;
  }

 private:
  Edge* follow_value(Node& node) {
    PyObject* const object = value(node);
    if (PyFunction_Check(object)) {
      return follow_function(node, object);
    }
    if (PyFloat_CheckExact(object)) {
      return node.find(float_token(object));
    }
    if (PyLong_CheckExact(object)) {
      return node.find(int_token(object));
    }
    if (PyUnicode_CheckExact(object) || PyBytes_CheckExact(object)) {
      return node.find(text_token(object));
    }
    if (PyTuple_CheckExact(object)) {
      return follow_tuple(node, object);
    }
    if (Py_TYPE(object) == partial_type) {
      return follow_partial(node, object);
    }
    if (Py_TYPE(object) == epilogue_type) {
      return follow_epilogue(node, object);
    }
    if (PyMethod_Check(object)) {
      return follow_method(node, object);
    }
    if (Edge* const same = node.find({Answer::kSame, 0, object})) {
      return same;
    }
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (PyFloat_Check(object)) {
      Edge* const edge = node.find({Answer::kFloatType, 0, type});
      PyRef const number = PyRef::steal(edge == nullptr ? nullptr : PyFloat_FromDouble(PyFloat_AS_DOUBLE(object)));
      return push(number.get()) ? edge : nullptr;
    }
    uint32_t const version = version_of(Py_TYPE(object));
    if (version == 0) {
      return nullptr;
    }
    Edge* const edge = node.find({Answer::kModule, version, type});
    return edge != nullptr ? follow_module(edge, object) : node.find({Answer::kClass, version, type});
  }

  // Code may ask whether two modules are one: no callable that has one twice is known.
  Edge* follow_module(Edge* edge, PyObject* module) {
    for (int k = 0; k < module_count_; ++k) {
      if (modules_[k] == module) {
        return nullptr;
      }
    }
    modules_[module_count_++] = module;
    return edge;
  }

  Edge* follow_function(Node& node, PyObject* object) {
    for (int k = 0; k < function_count_; ++k) {
      if (functions_[k] == object) {
        return node.find(whole(Answer::kSeen, k));
      }
    }
    Edge* const edge = node.find({Answer::kCode, 0, field(object, as_function(object)->func_code)});
    if (edge == nullptr) {
      return node.find({Answer::kSame, 0, object});
    }
    PyObject* const attributes = field(object, as_function(object)->func_dict);
    if (!edge->is_alive() || (attributes != nullptr && PyDict_GET_SIZE(attributes) != 0)) {
      return nullptr;
    }
    functions_[function_count_++] = object;
    set_function(node, object);
    return edge;
  }

  Edge* follow_tuple(Node& node, PyObject* object) {
    Py_ssize_t const size = PyTuple_GET_SIZE(object);
    Edge* const edge = node.find(whole(Answer::kTuple, size));
    for (Py_ssize_t k = 0; edge != nullptr && k < size; ++k) {
      if (!push(PyTuple_GET_ITEM(object, k))) {
        return nullptr;
      }
    }
    return edge;
  }

  Edge* follow_partial(Node& node, PyObject* object) {
    Edge* const edge = node.find(whole(Answer::kPartial, 0));
    if (edge == nullptr) {
      return nullptr;
    }
    PyObject* const attributes = hold(dict_of(object));
    if (attributes == nullptr || !PyDict_CheckExact(attributes) || PyDict_GET_SIZE(attributes) != 0) {
      return nullptr;
    }
    bool const pushed =
        push(hold(describe(partial_function, object))) && push(hold(describe(partial_arguments, object)));
    return pushed ? edge : nullptr;
  }

  Edge* follow_epilogue(Node& node, PyObject* object) {
    PyObject* const attributes = hold(dict_of(object));
    PyObject* const expression = hold(item_of(attributes, name_expression));
    PyObject* const operand_count = hold(item_of(attributes, name_operand_count));
    if (expression == nullptr || operand_count == nullptr || !PyLong_CheckExact(operand_count)) {
      return nullptr;
    }
    Edge* const edge = node.find({Answer::kEpilogue, int_token(operand_count).bits, expression});
    return edge != nullptr && edge->is_alive() ? edge : nullptr;
  }

  Edge* follow_method(Node& node, PyObject* object) {
    PyObject* const function = PyMethod_GET_FUNCTION(object);
    if (!PyFunction_Check(function)) {
      return nullptr;
    }
    Edge* const edge = node.find({Answer::kMethod, 0, field(function, as_function(function)->func_code)});
    PyObject* const attributes = field(function, as_function(function)->func_dict);
    if (edge == nullptr || !edge->is_alive() || (attributes != nullptr && PyDict_GET_SIZE(attributes) != 0)) {
      return nullptr;
    }
    set_function(node, function);
    return push(PyMethod_GET_SELF(object)) ? edge : nullptr;
  }

  static Edge* follow_same(Node& node, PyObject* found) {
    return node.find({Answer::kSame, 0, found == nullptr ? Py_None : found});
  }

  Edge* follow_qualname(Node& node) {
    PyObject* const name = field(function(node), as_function(function(node))->func_qualname);
    return name != nullptr && PyUnicode_CheckExact(name) ? node.find(text_token(name)) : nullptr;
  }

  PyObject* read_global(Node const& node) {
    PyFunctionObject* const owner = as_function(function(node));
    PyObject* const name = PyTuple_GET_ITEM(node.argument.get(), 0);
    if (!PyDict_CheckExact(owner->func_globals)) {
      return nullptr;
    }
    PyObject* const found = hold(item_of(owner->func_globals, name));
    return found != nullptr ? found : hold(item_of(owner->func_builtins, name));
  }

  PyObject* read_free(Node const& node) {
    PyObject* const closure = as_function(function(node))->func_closure;
    if (closure == nullptr || node.index >= PyTuple_GET_SIZE(closure)) {
      return nullptr;
    }
    return hold(PyRef::steal(PyCell_Get(PyTuple_GET_ITEM(closure, node.index))));
  }

  // Attributes of modules, up to the first thing that is not one: what was found first, by the first of the names, and
  // how many more were taken.
  std::pair<PyObject*, Py_ssize_t> through_modules(PyObject* found, PyObject* names) {
    Py_ssize_t depth = 0;
    while (found != nullptr && depth + 1 < PyTuple_GET_SIZE(names) && PyModule_CheckExact(found)) {
      ++depth;
      found = hold(item_of(PyModule_GetDict(found), PyTuple_GET_ITEM(names, depth)));
    }
    return {found, depth};
  }

  Edge* follow_chain(Node& node, PyObject* first) {
    auto const [found, depth] = through_modules(first, node.argument.get());
    return push(found) ? node.find(whole(Answer::kDepth, depth)) : nullptr;
  }

  // Of an object whose class has the version that an answer was given for: it decides what a read of the name does.
  Edge* follow_attribute(Node& node) {
    PyObject* const names = node.argument.get();
    auto const [first, place] = find_attribute(value(node), PyTuple_GET_ITEM(names, 0));
    auto const [found, depth] = through_modules(first, names);
    return push(found) ? node.find(place_token(static_cast<int64_t>(place), depth)) : nullptr;
  }

  std::pair<PyObject*, Place> find_attribute(PyObject* object, PyObject* name) {
    PyObject* const attributes = hold(dict_of(object));
    if (attributes == nullptr || !PyDict_CheckExact(attributes)) {
      return {nullptr, Place::kObject};
    }
    if (PyObject* const found = hold(item_of(attributes, name))) {
      return {found, Place::kObject};
    }
    if (PyObject* const found = find_in_class(Py_TYPE(object), name)) {
      return {found, Place::kClass};
    }
    for (PyObject* const home : {name_parameters, name_buffers}) {
      PyObject* const tensors = hold(item_of(attributes, home));
      if (tensors == nullptr || !PyDict_CheckExact(tensors) || hold(item_of(tensors, name)) != nullptr) {
        return {nullptr, Place::kChildren};
      }
    }
    return {hold(item_of(hold(item_of(attributes, name_modules)), name)), Place::kChildren};
  }

  Edge* follow_defaults(Node& node) {
    PyObject* const defaults = field(function(node), as_function(function(node))->func_defaults);
    if (defaults == nullptr || (PyTuple_CheckExact(defaults) && PyTuple_GET_SIZE(defaults) == 0)) {
      return node.find(whole(Answer::kSize, 0));
    }
    return push(defaults) ? node.find(whole(Answer::kSize, 1)) : nullptr;
  }

  bool push_items(PyObject* dict) {
    bool pushed = true;
    CUTFUSE_BEGIN_CRITICAL_SECTION(dict);
    Py_ssize_t position = 0;
    PyObject *key, *item;
    while (pushed && PyDict_Next(dict, &position, &key, &item) != 0) {
      pushed = push(key) && push(item);
    }
    CUTFUSE_END_CRITICAL_SECTION();
    return pushed;
  }

  Edge* follow_items(Node& node, PyObject* dict) {
    int const before = count_;
    if (dict != nullptr && (!PyDict_CheckExact(dict) || !push_items(dict))) {
      return nullptr;
    }
    return node.find(whole(Answer::kSize, (count_ - before) / 2));
  }

  // Whether a module may have a hook of all modules: `argument` says which function tells, by which containers.
  bool has_hooks(PyObject* argument) {
    PyObject* const home = PyTuple_GET_ITEM(argument, 0);
    PyObject* const names = PyTuple_GET_ITEM(argument, 3);
    PyObject* const check = hold(item_of(home, PyTuple_GET_ITEM(argument, 1)));
    if (check == nullptr || !PyFunction_Check(check) || as_function(check)->func_globals != home ||
        field(check, as_function(check)->func_code) != PyTuple_GET_ITEM(argument, 2)) {
      return true;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names); ++k) {
      PyObject* const hooks = hold(item_of(home, PyTuple_GET_ITEM(names, k)));
      if (hooks == nullptr || !is_container(hooks) || !is_empty(hooks)) {
        return true;
      }
    }
    return false;
  }

  Edge* follow_attributes(Node& node) {
    PyObject* const attributes = hold(dict_of(value(node)));
    if (attributes == nullptr || !PyDict_CheckExact(attributes)) {
      return nullptr;
    }
    for (Edge& edge : node.edges) {
      int const before = count_;
      if (push_attributes(attributes, edge.token.object)) {
        return &edge;
      }
      while (count_ > before) {
        hold(PyRef::steal(slots_[--count_].value));
      }
    }
    return nullptr;
  }

  // Whether a module's attributes have these names and types, in their order.
  bool push_attributes(PyObject* attributes, PyObject* description) {
    PyObject* const names = PyTuple_GET_ITEM(description, 0);
    PyObject* const types = PyTuple_GET_ITEM(description, 1);
    int64_t const children = int_token(PyTuple_GET_ITEM(description, 2)).bits;
    Py_ssize_t const size = PyTuple_GET_SIZE(names);
    bool is_same = false;
    CUTFUSE_BEGIN_CRITICAL_SECTION(attributes);
    Py_ssize_t position = 0;
    PyObject *key, *item;
    is_same = PyDict_GET_SIZE(attributes) == size;
    for (Py_ssize_t k = 0; is_same && k < size; ++k) {
      is_same = PyDict_Next(attributes, &position, &key, &item) != 0 && is_equal(key, PyTuple_GET_ITEM(names, k)) &&
                reinterpret_cast<PyObject*>(Py_TYPE(item)) == PyTuple_GET_ITEM(types, k) &&
                push_attribute(key, item, children);
    }
    CUTFUSE_END_CRITICAL_SECTION();
    return is_same;
  }

  bool push_attribute(PyObject* name, PyObject* item, int64_t children) {
    if (!is_container(item)) {
      return push(item);
    }
    if (children == 0 || !is_equal(name, name_modules)) {
      return is_empty(item);
    }
    int const before = count_;
    return PyDict_CheckExact(item) && push_items(item) && count_ - before == 2 * children;
  }

  Edge* follow_forward(Node& node) {
    PyObject* const forward = find_in_class(Py_TYPE(value(node)), name_forward);
    if (forward == nullptr || !PyFunction_Check(forward)) {
      return nullptr;
    }
    Edge* const edge = node.find({Answer::kCode, 0, field(forward, as_function(forward)->func_code)});
    if (edge == nullptr || !edge->is_alive()) {
      return nullptr;
    }
    set_function(node, forward);
    return edge;
  }

  // What classes hold. Those that are not Python's own have their dicts there.
  PyObject* find_in_class(PyTypeObject* type, PyObject* name) {
    PyObject* const bases = type->tp_mro;
    for (Py_ssize_t k = 0; bases != nullptr && k < PyTuple_GET_SIZE(bases); ++k) {
      PyTypeObject* const base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, k));
      if (PyObject* const found = hold(item_of(base->tp_dict, name))) {
        return found;
      }
    }
    return nullptr;
  }

  int function_count_ = 0;
  int module_count_ = 0;
  PyObject* functions_[kSlotsLimit];
  PyObject* modules_[kSlotsLimit];
};

}  // namespace cutfuse::call
