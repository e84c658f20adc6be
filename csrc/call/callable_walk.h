// Reads what a callable computes: everything from outside that its code can reach, breadth first.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call/python_objects.h"

namespace cutfuse::call {

constexpr int kValuesLimit = 256;  // of one callable
constexpr Py_ssize_t kTextLimit = 4096;
constexpr long kIntegerBitsLimit = 1024;

// A chain (name or index, attribute...): what code reads of a name or a free variable, and of that one by one. One that
// ends in None is compared with another value by identity.
using Chains = std::vector<PyRef>;

// What cutfuse/epilogue/fingerprint.py tells of code, which is kept so that no other takes its address.
struct CodeFacts {
  PyRef code;
  PyRef reads;    // stands for the code, and for equal code
  bool is_known;  // of a function that stands for itself
  bool is_function;
  bool is_method;
  bool is_forward;
  Chains globals;
  Chains free;
  Chains own;        // what a method reads of its object
  PyRef attributes;  // a tuple of names that a forward may read of its module
};

struct AttributeFacts {
  PyRef name;
  bool has_key;           // a read of it runs no code
  bool may_be_in_object;  // whatever the class has
  bool may_be_child;
  PyRef of_class;
};

// Of a class by its version, which is another one after anything about it or a base has changed.
struct ClassFacts {
  bool is_plain;
  PyRef forward;    // of PyTorch's own modules
  PyRef functions;  // what a call of a module runs besides: a tuple of such as `known` has
  std::unordered_map<PyObject*, AttributeFacts> attributes;
};

struct Facts {
  std::unordered_map<PyObject*, CodeFacts> codes;
  std::unordered_map<uint32_t, ClassFacts> classes;
  uint32_t module_version = 0;  // of torch.nn.Module's class, for which the facts of code are
};

// What is the same in the whole process; set once.
struct Language {
  PyObject* known = nullptr;  // a dict: of what stands for itself in a key (itself, code, defaults, attributes' count)
  PyObject* hooks = nullptr;  // of all modules: (namespace, name of the check, its code, containers), or None
  PyTypeObject* dtype = nullptr;
  PyTypeObject* tensor = nullptr;
  PyTypeObject* module = nullptr;
  PyTypeObject* epilogue = nullptr;
  PyTypeObject* partial = nullptr;
  // Descriptors of partial, which are C's.
  PyObject* partial_function = nullptr;
  PyObject* partial_arguments = nullptr;
  PyObject* partial_keywords = nullptr;
  PyObject* expression = nullptr;  // and other names
  PyObject* operand_count = nullptr;
  PyObject* modules = nullptr;
  PyObject* parameters = nullptr;
  PyObject* buffers = nullptr;
};

inline Language language;

enum class Answer {
  kSame,       // an object by identity: of Python's or the language's own
  kCode,       // by what stands for it
  kSeen,       // the function, partial or NaN that was found as number `bits`
  kFloat,      // by bits
  kInt,        // by value
  kText,       // str or bytes by type and value; an int beyond 64 bits, too
  kAttribute,  // of a torch.nn.Module: its name, and the address of its type as `bits`
  kTuple,      // of `bits` items, which become values
  kFloatType,  // a subclass of float; the float becomes a value
  kPartial,    // its function and its arguments become values
  kMethod,     // its object becomes a value
  kModule,     // a torch.nn.Module as a whole, of a class by its version
  kClass,      // an object of which attributes are read, of a class by its version
  kEpilogue,   // by its expression and its number of operands
  kDepth,      // how many attributes were taken
  kPlace,      // where an object has an attribute
  kSize,       // how many items there are
};

struct Token {
  Answer answer;
  int64_t bits;
  PyObject* object;
};

// Of two texts of the same type and hash, or integers. Runs no Python code: their types are Python's own.
inline bool is_equal(PyObject* first, PyObject* second) {
  if (first == second) {
    return true;
  }
  return Py_TYPE(first) == Py_TYPE(second) && PyObject_RichCompareBool(first, second, Py_EQ) == 1;
}

inline bool is_text(Token const& token) { return token.answer == Answer::kText || token.answer == Answer::kAttribute; }

inline bool operator==(Token const& first, Token const& second) {
  if (first.answer != second.answer || first.bits != second.bits) {
    return false;
  }
  return first.object == second.object || (is_text(first) && is_equal(first.object, second.object));
}

// In an array, and on the heap where they are many.
template <class T>
class Few {
 public:
  Few() = default;
  Few(Few const&) = delete;
  Few& operator=(Few const&) = delete;

  void push(T const& item) {
    if (count_ == kFew) more_.assign(few_, few_ + kFew);
    if (count_ >= kFew) {
      more_.push_back(item);
    } else {
      few_[count_] = item;
    }
    ++count_;
  }

  T const* begin() const { return count_ > kFew ? more_.data() : few_; }
  T const* end() const { return begin() + count_; }

 private:
  static constexpr size_t kFew = 64;

  size_t count_ = 0;
  T few_[kFew];
  std::vector<T> more_;
};

// A walk's tokens.
class Tokens {
 public:
  void push(Token const& token) {
    items_.push(token);
    uint64_t const object = is_text(token) ? 0 : reinterpret_cast<uintptr_t>(token.object) >> 4;
    hash_ = (hash_ ^ static_cast<uint64_t>(token.bits) ^ object) * 0x9E3779B97F4A7C15ull;
    hash_ ^= hash_ >> 32 ^ static_cast<uint64_t>(token.answer);
  }

  Token const* begin() const { return items_.begin(); }
  Token const* end() const { return items_.end(); }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0;
  Few<Token> items_;
};

// Where an object has an attribute: see cutfuse/epilogue/reads.py.
enum class Place { kObject, kClass, kChildren };

// What a walk has to be told before it can go on.
enum class Fact { kNone, kCode, kClass, kAttribute, kBase };

// `run` gives whether a callable has a key, which `tokens` then are: equal ones for equal callables. Where it has none
// because something is not known, `missing` says what, of a code or of a class and the name of an attribute. The values
// of a callable are held as long as its walk.
class Walk {
 public:
  // is_new: the callable may have no key yet, so that what a key implies is looked at too.
  Walk(Facts& facts, bool is_new) : facts_(facts), is_new_(is_new) {}
  Walk(Walk const&) = delete;
  Walk& operator=(Walk const&) = delete;

  ~Walk() {
    for (int k = 0; k < count_; ++k) {
      Py_DECREF(slots_[k].value);
    }
    for (PyObject* const object : held_) {
      Py_DECREF(object);
    }
  }

  bool run(PyObject* root) {
    bool const is_current = version_of(language.module) == facts_.module_version && facts_.module_version != 0;
    uint32_t const of_tensor = version_of(language.tensor);
    if (!is_current || of_tensor == 0) {
      return lacks(Fact::kBase, nullptr);
    }
    add(Answer::kInt, of_tensor);  // of the class whose methods functions call, which may be replaced
    push(root);
    for (int k = 0; k < count_; ++k) {
      if (!(slots_[k].is_whole ? take_value(slots_[k].value, k == 0) : take_attributes(slots_[k]))) {
        return false;
      }
    }
    return true;
  }

  Tokens tokens;
  Fact missing = Fact::kNone;
  PyRef missing_of;
  PyRef missing_name;

 private:
  // An object as a whole, or what chains read of it, each from its item `start` on.
  struct Slot {
    PyObject* value;
    PyRef const* chains;
    size_t chain_count;
    Py_ssize_t start;
    bool is_whole;
  };

  static PyFunctionObject* as_function(PyObject* object) { return reinterpret_cast<PyFunctionObject*>(object); }

  // For as long as the walk takes: another thread may drop what is read, or code of a key that is like a str, and what
  // the end of the last reference runs cannot run under the lock.
  PyObject* hold(PyRef&& reference) {
    PyObject* const object = reference.release();
    if (object != nullptr) held_.push(object);
    return object;
  }

  template <class T>
  PyObject* field(PyObject* owner, T* const& field) {
    return hold(field_of(owner, field));
  }

  bool lacks(Fact fact, PyObject* object, PyObject* name = nullptr) {
    missing = fact;
    missing_of = PyRef::share(object);
    missing_name = PyRef::share(name);
    return false;
  }

  bool push(PyObject* value) { return push({value, nullptr, 0, 0, true}); }

  bool push(Slot slot) {
    if (slot.value == nullptr || count_ == kValuesLimit) {
      return false;
    }
    Py_INCREF(slot.value);
    slots_[count_++] = slot;
    return true;
  }

  bool add(Answer answer, int64_t bits, PyObject* object = nullptr) {
    tokens.push({answer, bits, object});
    return true;
  }

  bool add_same(PyObject* object) { return add(Answer::kSame, 0, object); }

  bool add_text(PyObject* text) { return add(Answer::kText, PyObject_Hash(text), text); }

  CodeFacts const* facts_of(PyObject* code) {
    auto const found = facts_.codes.find(code);
    if (found != facts_.codes.end()) {
      return &found->second;
    }
    lacks(Fact::kCode, code);
    return nullptr;
  }

  ClassFacts* facts_of(PyTypeObject* type, uint32_t version) {
    auto const found = facts_.classes.find(version);
    if (version != 0 && found != facts_.classes.end()) {
      return &found->second;
    }
    lacks(Fact::kClass, reinterpret_cast<PyObject*>(type));
    return nullptr;
  }

  bool take_value(PyObject* object, bool is_root) {
    if (PyFunction_Check(object)) {
      return take_function(object);
    }
    PyTypeObject* const type = Py_TYPE(object);
    if (PyFloat_CheckExact(object)) {
      double const value = PyFloat_AS_DOUBLE(object);
      int64_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      return (value != value && take_seen(object)) || add(Answer::kFloat, bits);
    }
    if (PyLong_CheckExact(object)) {
      return take_integer(object);
    }
    if (PyUnicode_CheckExact(object) || PyBytes_CheckExact(object)) {
      text_ += PyUnicode_CheckExact(object) ? PyUnicode_GET_LENGTH(object) : PyBytes_GET_SIZE(object);
      return text_ <= kTextLimit && add_text(object);
    }
    if (PyTuple_CheckExact(object)) {
      return take_tuple(object);
    }
    if (object == Py_None || PyBool_Check(object) || type == language.dtype) {
      return add_same(object);
    }
    bool const is_class = type == &PyType_Type || object == reinterpret_cast<PyObject*>(language.tensor);
    if (is_class || type == &PyCFunction_Type || type == &PyMethodDescr_Type) {
      return item_of(language.known, object) && add_same(object);
    }
    if (type == language.partial) {
      return take_partial(object);
    }
    if (type == language.epilogue) {
      return is_root && take_epilogue(object);  // as another value it has a name and an identity
    }
    if (PyMethod_Check(object)) {
      return is_root && take_method(object);  // as another value it has a repr and an identity
    }
    if (PyType_IsSubtype(type, language.module)) {
      return take_module(object);
    }
    bool const is_numpy = PyFloat_Check(object) && std::strncmp(type->tp_name, "numpy.", 6) == 0;
    if (!is_numpy || PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) {
      return false;
    }
    double const value = PyFloat_AS_DOUBLE(object);
    PyRef const number = PyRef::steal(PyFloat_FromDouble(value));
    return (value != value && take_seen(object)) ||
           (add(Answer::kFloatType, 0, reinterpret_cast<PyObject*>(type)) && push(number.get()));
  }

  bool take_integer(PyObject* object) {
    int overflow = 0;
    long long const value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0) {
      return add(Answer::kInt, value);
    }
    PyRef const bits = PyRef::steal(PyObject_CallMethod(object, "bit_length", nullptr));
    return bits && PyLong_AsLong(bits.get()) <= kIntegerBitsLimit && add_text(object);
  }

  // Whether an object was reached before: then its number stands for it. Code may ask whether two objects are one, or
  // equal, which a NaN in a container is to itself alone.
  bool take_seen(PyObject* object) {
    PyObject** const end = seen_ + seen_count_;
    PyObject** const found = std::find(seen_, end, object);
    if (found == end) {
      seen_[seen_count_++] = object;
      return false;
    }
    return add(Answer::kSeen, found - seen_);
  }

  bool take_tuple(PyObject* object) {
    Py_ssize_t const size = PyTuple_GET_SIZE(object);
    for (Py_ssize_t k = 0; k < size; ++k) {
      if (!push(PyTuple_GET_ITEM(object, k))) {
        return false;
      }
    }
    return add(Answer::kTuple, size);
  }

  bool take_function(PyObject* object) {
    PyObject* const code = field(object, as_function(object)->func_code);
    auto const found = facts_.codes.find(code);
    bool const may_be_known = found == facts_.codes.end() || found->second.is_known;
    if (PyRef const known = may_be_known ? item_of(language.known, object) : PyRef()) {
      return is_as_told(known.get()) && add_same(object);
    }
    if (take_seen(object)) return true;
    if (found == facts_.codes.end()) {
      return lacks(Fact::kCode, code);
    }
    if (!found->second.is_function || has_attributes(object)) {
      return false;
    }
    return take_reads(object, found->second, Answer::kCode);
  }

  // Of an item of language.known.
  static bool is_as_told(PyObject* told) {
    PyObject* const owner = PyTuple_GET_ITEM(told, 0);
    PyFunctionObject* const own = as_function(owner);
    PyRef const defaults = field_of(owner, own->func_defaults);
    PyRef const attributes = field_of(owner, own->func_dict);
    return field_of(owner, own->func_code).get() == PyTuple_GET_ITEM(told, 1) &&
           (defaults ? defaults.get() : Py_None) == PyTuple_GET_ITEM(told, 2) &&
           (attributes ? PyDict_GET_SIZE(attributes.get()) : 0) == PyLong_AsSsize_t(PyTuple_GET_ITEM(told, 3));
  }

  static bool are_as_told(PyObject* functions) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(functions); ++k) {
      if (!is_as_told(PyTuple_GET_ITEM(functions, k))) {
        return false;
      }
    }
    return true;
  }

  bool has_attributes(PyObject* function) {
    PyObject* const attributes = field(function, as_function(function)->func_dict);
    return attributes != nullptr && PyDict_GET_SIZE(attributes) != 0;
  }

  // What a function reads. Its name is a part of what f"{fn}" gives.
  bool take_reads(PyObject* function, CodeFacts const& facts, Answer answer) {
    PyFunctionObject* const own = as_function(function);
    PyObject* const name = field(function, own->func_qualname);
    if (name == nullptr || !PyUnicode_CheckExact(name) || PyUnicode_GET_LENGTH(name) > kTextLimit) {
      return false;
    }
    add(answer, 0, facts.reads.get());
    add_text(name);
    for (PyRef const& chain : facts.globals) {
      if (!take_chain(read_global(own, PyTuple_GET_ITEM(chain.get(), 0)), chain, 1)) {
        return false;
      }
    }
    for (PyRef const& chain : facts.free) {
      if (!take_chain(read_free(own, PyLong_AsSsize_t(PyTuple_GET_ITEM(chain.get(), 0))), chain, 1)) {
        return false;
      }
    }
    PyObject* const defaults = field(function, own->func_defaults);
    bool const has_defaults = defaults != nullptr && PyTuple_GET_SIZE(defaults) != 0;
    add(Answer::kSize, has_defaults ? 1 : 0);
    return (!has_defaults || push(defaults)) && take_items(field(function, own->func_kwdefaults));
  }

  PyObject* read_global(PyFunctionObject* function, PyObject* name) {
    if (!PyDict_CheckExact(function->func_globals)) {  // a subclass may compute what it gives
      return nullptr;
    }
    PyObject* const found = hold(item_of(function->func_globals, name));
    if (found != nullptr) {
      return found;
    }
    // A function that this one makes takes what the globals call so.
    static PyObject* const builtins = PyUnicode_InternFromString("__builtins__");
    PyObject* const named = hold(item_of(function->func_globals, builtins));
    PyObject* const home = named != nullptr && PyModule_Check(named) ? PyModule_GetDict(named) : named;
    bool const is_same = home == nullptr || home == function->func_builtins;
    return is_same ? hold(item_of(function->func_builtins, name)) : nullptr;
  }

  PyObject* read_free(PyFunctionObject* function, Py_ssize_t index) {
    PyObject* const closure = function->func_closure;
    if (closure == nullptr || index >= PyTuple_GET_SIZE(closure)) {
      return nullptr;
    }
    return hold(PyRef::steal(PyCell_Get(PyTuple_GET_ITEM(closure, index))));
  }

  // What the attributes of a chain give, from `start` on, where the value is a module: up to the first thing that is
  // not one, which becomes a value. How far that is belongs to the key: an attribute may be a module with an attribute
  // `imag`, or a number.
  bool take_chain(PyObject* value, PyRef const& chain, Py_ssize_t start) {
    Py_ssize_t size = PyTuple_GET_SIZE(chain.get());
    bool const is_compared = PyTuple_GET_ITEM(chain.get(), size - 1) == Py_None;
    size -= is_compared ? 1 : 0;
    Py_ssize_t place = start;
    for (; value != nullptr && place < size && PyModule_CheckExact(value); ++place) {
      value = hold(item_of(PyModule_GetDict(value), PyTuple_GET_ITEM(chain.get(), place)));
    }
    if (value == nullptr) {
      return false;
    }
    if (start < size) {
      add(Answer::kDepth, place - start);
    }
    if (place == size) {
      return (!is_compared || has_identity(value)) && push(value);
    }
    bool is_plain = false;
    if (!read_is_plain(Py_TYPE(value), is_plain)) {
      return false;
    }
    if (is_plain) {
      return push({value, &chain, 1, place, false});
    }
    // Attributes of these may change without their key changing.
    bool const is_callable = PyFunction_Check(value) || PyCFunction_Check(value) ||
                             Py_TYPE(value) == &PyMethodDescr_Type || PyObject_TypeCheck(value, language.partial);
    return !is_callable && !is_compared && value != reinterpret_cast<PyObject*>(language.tensor) && push(value);
  }

  // Whether the key tells an object from all others, not only from those of other values.
  static bool has_identity(PyObject* object) {
    bool const is_number = (PyLong_Check(object) && !PyBool_Check(object)) || PyFloat_Check(object);
    return !is_number && !PyUnicode_Check(object) && !PyBytes_Check(object) && !PyTuple_Check(object);
  }

  // False where it is not known yet.
  bool read_is_plain(PyTypeObject* type, bool& is_plain) {
    if (PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) {
      ClassFacts const* const facts = facts_of(type, version_of(type));
      is_plain = facts != nullptr && facts->is_plain;
      return facts != nullptr;
    }
    return true;
  }

  // Attributes of an object whose class has the version that the facts are of: it decides what a read does.
  bool take_attributes(Slot slot) {
    PyTypeObject* const type = Py_TYPE(slot.value);
    uint32_t const version = version_of(type);
    ClassFacts* const facts = facts_of(type, version);
    if (facts == nullptr || !facts->is_plain) {
      return false;
    }
    add(Answer::kClass, version);
    for (size_t k = 0; k < slot.chain_count; ++k) {
      PyRef const& chain = slot.chains[k];
      auto const [found, place] = find_attribute(slot.value, *facts, PyTuple_GET_ITEM(chain.get(), slot.start));
      if (found == nullptr) {
        return false;
      }
      // A copy, which has the class too, would read what the class holds at that time.
      if (place == Place::kClass && slot.start + 1 < PyTuple_GET_SIZE(chain.get())) {
        bool is_plain = false;
        if (PyModule_CheckExact(found) || !read_is_plain(Py_TYPE(found), is_plain) || is_plain) {
          return false;
        }
      }
      add(Answer::kPlace, static_cast<int64_t>(place));
      if (!take_chain(found, chain, slot.start + 1)) {
        return false;
      }
    }
    return Py_TYPE(slot.value) == type;
  }

  std::pair<PyObject*, Place> find_attribute(PyObject* object, ClassFacts& of_class, PyObject* name) {
    auto const item = of_class.attributes.find(name);
    PyObject* const attributes = hold(dict_of(object));
    if (item == of_class.attributes.end()) {
      lacks(Fact::kAttribute, reinterpret_cast<PyObject*>(Py_TYPE(object)), name);
      return {nullptr, Place::kObject};
    }
    AttributeFacts const& facts = item->second;
    if (!facts.has_key || attributes == nullptr || !PyDict_CheckExact(attributes)) {
      return {nullptr, Place::kObject};
    }
    if (PyObject* const found = hold(item_of(attributes, name))) {
      return {facts.may_be_in_object ? found : nullptr, Place::kObject};
    }
    if (facts.of_class) {
      return {facts.of_class.get(), Place::kClass};
    }
    if (!facts.may_be_child || !are_as_told(of_class.functions.get())) {
      return {nullptr, Place::kChildren};
    }
    for (PyObject* const home : {language.parameters, language.buffers}) {
      PyObject* const tensors = hold(item_of(attributes, home));
      if (tensors == nullptr || !PyDict_CheckExact(tensors) || hold(item_of(tensors, name)) != nullptr) {
        return {nullptr, Place::kChildren};
      }
    }
    return {hold(item_of(hold(item_of(attributes, language.modules)), name)), Place::kChildren};
  }

  bool take_partial(PyObject* object) {
    if (take_seen(object)) return true;
    PyObject* const attributes = hold(dict_of(object));
    if (attributes == nullptr || !PyDict_CheckExact(attributes) || PyDict_GET_SIZE(attributes) != 0) {
      return false;
    }
    add(Answer::kPartial, 0);
    return push(hold(describe(language.partial_function, object))) &&
           push(hold(describe(language.partial_arguments, object))) &&
           take_items(hold(describe(language.partial_keywords, object)));
  }

  // By its expression: an Epilogue may be made anew for every call.
  bool take_epilogue(PyObject* object) {
    PyObject* const attributes = hold(dict_of(object));
    PyObject* const expression = hold(item_of(attributes, language.expression));
    PyObject* const operand_count = hold(item_of(attributes, language.operand_count));
    if (expression == nullptr || operand_count == nullptr || !PyLong_CheckExact(operand_count)) {
      return false;
    }
    return add(Answer::kEpilogue, PyLong_AsLongLong(operand_count), expression);
  }

  // One written in Python that reads attributes of its object, and uses the object for nothing else.
  bool take_method(PyObject* object) {
    PyObject* const function = PyMethod_GET_FUNCTION(object);
    if (!PyFunction_Check(function)) {
      return false;
    }
    CodeFacts const* const facts = facts_of(field(function, as_function(function)->func_code));
    if (facts == nullptr || !facts->is_method || has_attributes(function)) {
      return false;
    }
    return push({PyMethod_GET_SELF(object), facts->own.data(), facts->own.size(), 0, false}) &&
           take_reads(function, *facts, Answer::kMethod);
  }

  // PyTorch's own modules without tensors and hooks: their class, what `forward` reads, and their attributes.
  bool take_module(PyObject* module) {
    uint32_t const version = version_of(Py_TYPE(module));
    ClassFacts const* const of_class = facts_of(Py_TYPE(module), version);
    if (of_class == nullptr || !of_class->forward || is_twice(module) || has_hooks() ||
        !are_as_told(of_class->functions.get())) {
      return false;
    }
    PyObject* const forward = of_class->forward.get();
    CodeFacts const* const facts = facts_of(field(forward, as_function(forward)->func_code));
    PyObject* const attributes = hold(dict_of(module));
    if (facts == nullptr || !facts->is_forward || attributes == nullptr || !PyDict_CheckExact(attributes)) {
      return false;
    }
    for (Py_ssize_t k = 0; is_new_ && k < PyTuple_GET_SIZE(facts->attributes.get()); ++k) {
      if (hold(item_of(attributes, PyTuple_GET_ITEM(facts->attributes.get(), k))) == nullptr) {
        return false;
      }
    }
    add(Answer::kModule, version);
    return take_dict(attributes, &Walk::take_module_attribute) && take_reads(forward, *facts, Answer::kCode);
  }

  // Code may ask whether two modules are one.
  bool is_twice(PyObject* module) const {
    int found = 0;
    for (int k = 0; k < count_; ++k) {
      found += slots_[k].value == module && slots_[k].is_whole;
    }
    return found > 1;
  }

  bool take_module_attribute(PyObject* name, PyObject* value) {
    if (!PyUnicode_CheckExact(name)) {
      return false;
    }
    // With the type, as an empty container has no part of its own.
    add(Answer::kAttribute, static_cast<int64_t>(reinterpret_cast<intptr_t>(Py_TYPE(value))), name);
    if (!is_container(value)) {
      return push(value);
    }
    bool const has_children = PyDict_CheckExact(value) && is_equal(name, language.modules);
    return is_empty(value) || (has_children && take_items(value));
  }

  // Whether a module may have a hook of all modules: the check's function reads these containers and nothing else.
  bool has_hooks() {
    if (!PyTuple_CheckExact(language.hooks)) {
      return true;
    }
    PyObject* const home = PyTuple_GET_ITEM(language.hooks, 0);
    PyObject* const names = PyTuple_GET_ITEM(language.hooks, 3);
    PyObject* const check = hold(item_of(home, PyTuple_GET_ITEM(language.hooks, 1)));
    if (check == nullptr || !PyFunction_Check(check) || as_function(check)->func_globals != home ||
        field(check, as_function(check)->func_code) != PyTuple_GET_ITEM(language.hooks, 2)) {
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

  // Names and values; nothing where there is no dict.
  bool take_items(PyObject* dict) {
    if (dict == nullptr) {
      return add(Answer::kSize, 0);
    }
    return PyDict_CheckExact(dict) && take_dict(dict, &Walk::push_item);
  }

  bool push_item(PyObject* key, PyObject* item) { return push(key) && push(item); }

  bool take_dict(PyObject* dict, bool (Walk::*take)(PyObject*, PyObject*)) {
    bool has_key = true;
    CUTFUSE_BEGIN_CRITICAL_SECTION(dict);
    add(Answer::kSize, PyDict_GET_SIZE(dict));
    Py_ssize_t position = 0;
    PyObject *key, *item;
    while (has_key && PyDict_Next(dict, &position, &key, &item) != 0) {
      has_key = (this->*take)(key, item);
    }
    CUTFUSE_END_CRITICAL_SECTION();
    return has_key;
  }

  Facts& facts_;
  bool is_new_;
  Few<PyObject*> held_;
  Py_ssize_t text_ = 0;
  int count_ = 0;
  int seen_count_ = 0;
  Slot slots_[kValuesLimit];
  PyObject* seen_[kValuesLimit];  // functions, partials and NaNs
};

}  // namespace cutfuse::call
