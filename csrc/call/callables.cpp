#include "call/callables.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call/callable_walk.h"
#include "call/python_objects.h"

#ifdef Py_GIL_DISABLED
#include <pthread.h>
#endif

namespace cutfuse::call {
namespace {

// With these and the limits of a key and of code, full tables stay below 100 MB at the very worst.
constexpr size_t kKeysLimit = 4096;
constexpr size_t kFactsLimit = 1024;
constexpr uint64_t kIdentity = 1;

// With a GIL that is the lock: nothing below gives it up. PyMutex lets others stop the world while a thread waits for
// it.
#ifdef Py_GIL_DISABLED
PyMutex mutex = {};

void repair() { mutex = {}; }  // the thread that held it is not in the child

class Lock {
 public:
  Lock() { PyMutex_Lock(&mutex); }
  ~Lock() { PyMutex_Unlock(&mutex); }
};

[[maybe_unused]] int const registered = pthread_atfork(nullptr, nullptr, repair);
#else
class Lock {
 public:
  Lock() {}  // NOLINT(modernize-use-equals-default): a defaulted one would make every lock an unused variable
};
#endif

struct Entry {
  std::vector<Token> tokens;
  std::vector<PyRef> owned;  // what the tokens point to
  uint64_t number;
};

using Keys = std::unordered_multimap<uint64_t, Entry>;  // by the hash of the tokens

Keys& keys = *new Keys;  // never freed, as the facts: Python may be gone by then
Facts& facts = *new Facts;
uint64_t numbers = kIdentity;
uint64_t hits = 0;
int walks = 0;  // under way: with a GIL a dict's foreign keys may run Python code within one

// Whether a callable has a key; under the lock.
bool walk_through(Walk& walk, PyObject* callable) {
  if (language.known == nullptr) {
    walk.missing = Fact::kBase;
    return false;
  }
  ++walks;
  bool const has_key = walk.run(callable);
  --walks;
  return has_key;
}

// What was found last by the lowest bits of a hash: a table's own search divides twice, which takes 10 ns.
struct Recent {
  uint64_t hash;
  Entry const* entry;
};
Recent recent[256] = {};

uint64_t find(Tokens const& tokens) {
  Recent& last = recent[tokens.hash() % std::size(recent)];
  auto const is_same = [&](Entry const& entry) {
    return std::equal(entry.tokens.begin(), entry.tokens.end(), tokens.begin(), tokens.end());
  };
  if (last.entry != nullptr && last.hash == tokens.hash() && is_same(*last.entry)) {
    return last.entry->number;
  }
  auto const range = keys.equal_range(tokens.hash());
  for (auto item = range.first; item != range.second; ++item) {
    if (is_same(item->second)) {
      last = {tokens.hash(), &item->second};
      return item->second.number;
    }
  }
  return 0;
}

// When the table is full the older half goes, to `dropped`.
uint64_t add(Tokens const& tokens, std::vector<Entry>& dropped) {
  if (keys.size() >= kKeysLimit) {
    std::fill(std::begin(recent), std::end(recent), Recent());
    std::vector<uint64_t> known;
    for (auto const& item : keys) {
      known.push_back(item.second.number);
    }
    auto const middle = known.begin() + kKeysLimit / 2;
    std::nth_element(known.begin(), middle, known.end());
    for (auto item = keys.begin(); item != keys.end();) {
      if (item->second.number < *middle) {
        dropped.push_back(std::move(item->second));
        item = keys.erase(item);
      } else {
        ++item;
      }
    }
  }
  Entry entry{{tokens.begin(), tokens.end()}, {}, ++numbers};
  for (Token const& token : tokens) {
    if (token.object != nullptr) entry.owned.push_back(PyRef::share(token.object));
    if (token.answer == Answer::kAttribute) {
      entry.owned.push_back(PyRef::share(reinterpret_cast<PyObject*>(static_cast<intptr_t>(token.bits))));
    }
  }
  keys.emplace(tokens.hash(), std::move(entry));
  return numbers;
}

PyObject* describe_missing(Walk const& walk) {
  constexpr char const* kNames[] = {"", "code", "class", "attribute", "base"};
  char const* const name = kNames[static_cast<int>(walk.missing)];
  if (walk.missing == Fact::kBase) return Py_BuildValue("(s)", name);
  if (walk.missing == Fact::kAttribute) {
    return Py_BuildValue("(sOO)", name, walk.missing_of.get(), walk.missing_name.get());
  }
  return Py_BuildValue("(sO)", name, walk.missing_of.get());
}

bool parse_chains(PyObject* given, Chains& chains) {
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(given); ++k) {
    PyObject* const chain = PyTuple_GET_ITEM(given, k);
    if (!PyTuple_Check(chain) || PyTuple_GET_SIZE(chain) == 0) {
      PyErr_Format(PyExc_ValueError, "no chain of names: %R", chain);
      return false;
    }
    chains.push_back(PyRef::share(chain));
  }
  return true;
}

bool learn_code(PyObject* given) {
  PyObject *code, *reads, *globals, *free, *own, *attributes;
  int is_function, is_method, is_forward;
  unsigned version;
  CodeFacts found;
  if (!PyArg_ParseTuple(given, "O!OpppO!O!O!O!I", &PyCode_Type, &code, &reads, &is_function, &is_method, &is_forward,
                        &PyTuple_Type, &globals, &PyTuple_Type, &free, &PyTuple_Type, &own, &PyTuple_Type, &attributes,
                        &version) ||
      !parse_chains(globals, found.globals) || !parse_chains(free, found.free) || !parse_chains(own, found.own)) {
    return false;
  }
  found.code = PyRef::share(code);
  found.reads = PyRef::share(reads);
  found.attributes = PyRef::share(attributes);
  found.is_known = PyDict_Contains(language.known, code) == 1;
  found.is_function = is_function != 0;
  found.is_method = is_method != 0;
  found.is_forward = is_forward != 0;
  std::unordered_map<PyObject*, CodeFacts> former;  // dropped after the lock is free again, as what is found
  Lock const lock;
  if (walks != 0 || version != facts.module_version) {
    return true;
  }
  if (facts.codes.size() >= kFactsLimit) {
    std::swap(facts.codes, former);
  }
  facts.codes.emplace(code, std::move(found));
  return true;
}

bool learn_class(PyObject* given) {
  unsigned version;
  int is_plain;
  PyObject *forward, *functions;
  if (!PyArg_ParseTuple(given, "IpOO!", &version, &is_plain, &forward, &PyTuple_Type, &functions)) return false;
  ClassFacts found{is_plain != 0, forward == Py_None ? PyRef() : PyRef::share(forward), PyRef::share(functions), {}};
  std::unordered_map<uint32_t, ClassFacts> former;
  Lock const lock;
  if (walks != 0) {
    return true;
  }
  if (facts.classes.size() >= kFactsLimit) {
    std::swap(facts.classes, former);
  }
  facts.classes.emplace(version, std::move(found));
  return true;
}

// of_class: a tuple of what the class has, or an empty one.
bool learn_attribute(PyObject* given) {
  unsigned version;
  int has_key, may_be_in_object, may_be_child;
  PyObject *name, *of_class;
  if (!PyArg_ParseTuple(given, "IOpppO!", &version, &name, &has_key, &may_be_in_object, &may_be_child, &PyTuple_Type,
                        &of_class)) {
    return false;
  }
  bool const is_in_class = PyTuple_GET_SIZE(of_class) != 0;
  AttributeFacts found{PyRef::share(name), has_key != 0, may_be_in_object != 0, may_be_child != 0,
                       is_in_class ? PyRef::share(PyTuple_GET_ITEM(of_class, 0)) : PyRef()};
  std::unordered_map<PyObject*, AttributeFacts> former;
  Lock const lock;
  auto const item = facts.classes.find(version);
  if (walks == 0 && item != facts.classes.end()) {
    if (item->second.attributes.size() >= kFactsLimit) {
      std::swap(item->second.attributes, former);
    }
    item->second.attributes.emplace(name, std::move(found));
  }
  return true;
}

// A version of torch.nn.Module's class, for which the facts of code are from now on.
bool learn_base(PyObject* given) {
  unsigned version;
  if (!PyArg_ParseTuple(given, "I", &version)) return false;
  std::unordered_map<PyObject*, CodeFacts> former;
  Lock const lock;
  if (walks == 0) {
    std::swap(facts.codes, former);
    facts.module_version = version;
  }
  return true;
}

}  // namespace

uint64_t recognise(PyObject* callable) {
  if (callable == Py_None) {
    return kIdentity;
  }
  Walk walk(facts, false);  // ends after the lock is free again
  Lock const lock;
  if (keys.empty() || !walk_through(walk, callable)) {
    return 0;
  }
  uint64_t const number = find(walk.tokens);
  hits += number != 0;
  return number;
}

PyObject* number_of(PyObject* callable) {
  Walk walk(facts, true);
  std::vector<Entry> dropped;
  std::optional<uint64_t> number;
  {
    Lock const lock;
    if (walk_through(walk, callable)) {
      number = find(walk.tokens);
      if (number == 0u && walks == 0) number = add(walk.tokens, dropped);
    } else if (walk.missing == Fact::kNone) {
      number = 0;
    }
  }
  return number ? PyLong_FromUnsignedLongLong(*number) : describe_missing(walk);
}

uint64_t new_number() {
  Lock const lock;
  return ++numbers;
}

bool learn_fact(PyObject* name, PyObject* given) {
  if (language.known == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the language is to be told first");
    return false;
  }
  bool (*const learners[])(PyObject*) = {&learn_code, &learn_class, &learn_attribute, &learn_base};
  char const* const names[] = {"code", "class", "attribute", "base"};
  for (size_t k = 0; k < 4; ++k) {
    if (PyUnicode_CompareWithASCIIString(name, names[k]) == 0) return learners[k](given);
  }
  PyErr_Format(PyExc_ValueError, "there are no facts of %R", name);
  return false;
}

bool learn_language(PyObject* known, PyObject* hooks, PyObject* types) {
  PyTypeObject *dtype, *tensor, *module, *epilogue, *partial;
  if (!PyArg_ParseTuple(types, "O!O!O!O!O!", &PyType_Type, &dtype, &PyType_Type, &tensor, &PyType_Type, &module,
                        &PyType_Type, &epilogue, &PyType_Type, &partial)) {
    return false;
  }
  PyObject** const descriptors[] = {&language.partial_function, &language.partial_arguments,
                                    &language.partial_keywords};
  char const* const fields[] = {"func", "args", "keywords"};
  for (size_t k = 0; k < 3; ++k) {
    *descriptors[k] = PyObject_GetAttrString(reinterpret_cast<PyObject*>(partial), fields[k]);
    if (*descriptors[k] == nullptr || Py_TYPE(*descriptors[k]) != &PyMemberDescr_Type) {
      PyErr_SetString(PyExc_TypeError, "functools.partial has to be C's");
      return false;
    }
  }
  PyObject** const names[] = {&language.expression, &language.operand_count, &language.modules, &language.parameters,
                              &language.buffers};
  char const* const texts[] = {"expression", "operand_count", "_modules", "_parameters", "_buffers"};
  for (size_t k = 0; k < 5; ++k) {
    *names[k] = PyUnicode_InternFromString(texts[k]);
  }
  for (PyTypeObject* const type : {dtype, tensor, module, epilogue, partial}) {
    Py_INCREF(type);
  }
  language.dtype = dtype;
  language.tensor = tensor;
  language.module = module;
  language.epilogue = epilogue;
  language.partial = partial;
  language.hooks = Py_NewRef(hooks);
  Lock const lock;
  language.known = Py_NewRef(known);
  return true;
}

uint32_t class_version(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  static PyObject* const name = PyUnicode_InternFromString("forward");
  _PyType_Lookup(type, name);  // which gives the class a version
#else
  PyUnstable_Type_AssignVersionTag(type);
#endif
  return version_of(type);
}

void forget_callables() {
  Keys former;
  Facts former_facts;
  Lock const lock;
  if (walks == 0) {
    std::fill(std::begin(recent), std::end(recent), Recent());
    std::swap(keys, former);
    std::swap(facts, former_facts);
  }
}

CallableCounts callable_counts() {
  Lock const lock;
  return {keys.size(), numbers - kIdentity, hits};
}

}  // namespace cutfuse::call
