#include "call/callables.h"

#include <iterator>
#include <utility>
#include <vector>

#include "call/callable_walk.h"
#include "call/observations.h"
#include "call/python_objects.h"

#ifdef Py_GIL_DISABLED
#include <pthread.h>
#endif

namespace cutfuse::call {
namespace {

// A step of a trail, see cutfuse/epilogue/fingerprint.py.
struct Step {
  Node node;  // without edges
  Edge edge;
};

enum class Parsed { kSteps, kInexpressible, kError };  // after an error an exception is set

// By Read and by Answer.
constexpr char const* kReads[] = {"value",      "code",     "default values",   "qualname", "global",
                                  "free",       "defaults", "keyword defaults", "keywords", "hooks",
                                  "attributes", "forward",  "attribute"};
constexpr char const* kAnswers[] = {"same",     "code",          "seen",    "float",  "int",    "text",
                                    "tuple",    "float of type", "partial", "method", "module", "class",
                                    "epilogue", "depth",         "place",   "size",   "names",  "none"};
static_assert(std::size(kReads) == static_cast<size_t>(Read::kEnd) &&
              std::size(kAnswers) == static_cast<size_t>(Answer::kNone) + 1);

template <class T, size_t kCount>
bool parse_name(char const* const (&names)[kCount], PyObject* text, T& value) {
  for (size_t k = 0; k < kCount; ++k) {
    if (PyUnicode_CompareWithASCIIString(text, names[k]) == 0) {
      value = static_cast<T>(k);
      return true;
    }
  }
  PyErr_Format(PyExc_ValueError, "a trail has no %R", text);
  return false;
}

// The token of an answer, and what keeps its object. `found` is what Python's fingerprint looked at.
Parsed parse_answer(Answer answer, PyObject* found, Edge& edge) {
  PyObject* first = found;
  PyObject* second = nullptr;
  bool const is_pair =
      answer == Answer::kModule || answer == Answer::kClass || answer == Answer::kEpilogue || answer == Answer::kPlace;
  if (is_pair && !PyArg_ParseTuple(found, "OO", &first, &second)) return Parsed::kError;
  edge.token = {answer, 0, nullptr};
  switch (answer) {
    case Answer::kFloat:
      edge.token = float_token(found);
      return Parsed::kSteps;
    case Answer::kInt:
      edge.token = int_token(found);
      edge.owned = PyRef::share(edge.token.object);
      return Parsed::kSteps;
    case Answer::kText:
      edge.token = text_token(found);
      edge.owned = PyRef::share(found);
      return Parsed::kSteps;
    case Answer::kSeen:
    case Answer::kTuple:
    case Answer::kDepth:
    case Answer::kSize:
      edge.token.bits = PyLong_AsLongLong(found);
      return PyErr_Occurred() == nullptr ? Parsed::kSteps : Parsed::kError;
    case Answer::kPartial:
    case Answer::kNone:
      return Parsed::kSteps;
    case Answer::kSame:
    case Answer::kFloatType:
    case Answer::kNames:
      edge.token.object = found;
      edge.owned = PyRef::share(found);
      return Parsed::kSteps;
    case Answer::kPlace:
      edge.token = place_token(PyLong_AsLongLong(first), PyLong_AsLongLong(second));
      return PyErr_Occurred() == nullptr ? Parsed::kSteps : Parsed::kError;
    case Answer::kModule:
    case Answer::kClass:
      edge.token = {answer, PyLong_AsLongLong(second), first};
      return edge.token.bits == 0 ? Parsed::kInexpressible : Parsed::kSteps;
    case Answer::kEpilogue:
      edge.token.bits = PyLong_AsLongLong(second);
      [[fallthrough]];
    case Answer::kCode:
    case Answer::kMethod:
      edge.token.object = first;
      edge.weak = PyRef::steal(PyWeakref_NewRef(first, nullptr));
      return edge.weak ? Parsed::kSteps : Parsed::kError;
  }
  return Parsed::kError;
}

// Whether the argument of a read is what it walks over.
bool is_argument(Read read, PyObject* argument) {
  Py_ssize_t const size = PyTuple_Check(argument) ? PyTuple_GET_SIZE(argument) : 0;
  switch (read) {
    case Read::kGlobal:
    case Read::kAttribute:
      return size > 0;
    case Read::kFree:
      return size > 0 && PyLong_Check(PyTuple_GET_ITEM(argument, 0));
    case Read::kHooks:
      return size == 4 && PyTuple_Check(PyTuple_GET_ITEM(argument, 3));
    default:
      return true;
  }
}

Parsed parse_step(PyObject* item, Step& step) {
  PyObject *read, *argument, *answer_name, *found;
  Answer answer;
  if (!PyTuple_Check(item)) {
    PyErr_SetString(PyExc_TypeError, "a trail is a list of tuples");
    return Parsed::kError;
  }
  if (!PyArg_ParseTuple(item, "UiOUO", &read, &step.node.slot, &argument, &answer_name, &found) ||
      !parse_name(kReads, read, step.node.read) || !parse_name(kAnswers, answer_name, answer)) {
    return Parsed::kError;
  }
  if (!is_argument(step.node.read, argument)) {
    PyErr_Format(PyExc_ValueError, "no argument of %U: %R", read, argument);
    return Parsed::kError;
  }
  if (step.node.slot < 0 || step.node.slot >= kSlotsLimit) {
    return Parsed::kInexpressible;
  }
  step.node.argument = PyRef::share(argument);
  if (step.node.read == Read::kFree) {
    step.node.index = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(argument, 0)));
  }
  return parse_answer(answer, found, step.edge);
}

Parsed parse_trail(PyObject* trail, std::vector<Step>& steps) {
  steps.resize(static_cast<size_t>(PyList_GET_SIZE(trail)));
  for (size_t k = 0; k < steps.size(); ++k) {
    Parsed const parsed = parse_step(PyList_GET_ITEM(trail, static_cast<Py_ssize_t>(k)), steps[k]);
    if (parsed != Parsed::kSteps) {
      return parsed;
    }
  }
  return steps.empty() ? Parsed::kInexpressible : Parsed::kSteps;
}

constexpr size_t kNodesLimit = 16384;  // a table of code that is compiled again and again starts anew here
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

std::vector<Node>& nodes = *new std::vector<Node>;  // never freed: Python may be gone by then
uint64_t numbers = kIdentity;
uint64_t hits = 0;
int walks = 0;  // under way: with a GIL a dict's foreign keys may run Python code within one

bool is_same_description(PyObject* first, PyObject* second) {
  for (Py_ssize_t k = 0; k < 2; ++k) {  // names, then types
    PyObject* const one = PyTuple_GET_ITEM(first, k);
    PyObject* const other = PyTuple_GET_ITEM(second, k);
    Py_ssize_t const size = PyTuple_GET_SIZE(one);
    for (Py_ssize_t item = 0; item < size; ++item) {
      if (size != PyTuple_GET_SIZE(other) ||
          !(k == 0 ? is_equal(PyTuple_GET_ITEM(one, item), PyTuple_GET_ITEM(other, item))
                   : PyTuple_GET_ITEM(one, item) == PyTuple_GET_ITEM(other, item))) {
        return false;
      }
    }
    if (size != PyTuple_GET_SIZE(other)) {
      return false;
    }
  }
  return is_equal(PyTuple_GET_ITEM(first, 2), PyTuple_GET_ITEM(second, 2));
}

Edge* find_for_learning(Node& node, Token const& token) {
  if (token.answer != Answer::kNames) {
    return node.find(token);
  }
  for (Edge& edge : node.edges) {
    if (is_same_description(edge.token.object, token.object)) {
      return &edge;
    }
  }
  return nullptr;
}

// Whether a node reads what a step says; one that reads nothing yet does so from now on.
bool takes(Node& node, Node& wanted) {
  bool const is_new = node.read == Read::kEnd && node.number == 0;
  if (is_new) {
    std::swap(node.read, wanted.read);
    node.slot = wanted.slot;
    node.index = wanted.index;
    node.argument = std::move(wanted.argument);
    return true;
  }
  // The answers so far decide what is read next, and by which name.
  return node.read == wanted.read && node.slot == wanted.slot;
}

// Adds a path; under the lock, without a call of Python's that could run code.
bool add_path(std::vector<Step>& steps, uint64_t number, std::vector<PyRef>& dropped) {
  size_t place = 0;
  for (Step& step : steps) {
    if (!takes(nodes[place], step.node)) {
      return false;
    }
    Edge* edge = find_for_learning(nodes[place], step.edge.token);
    if (edge == nullptr || !edge->is_alive()) {
      size_t const child = nodes.size();
      nodes.emplace_back();
      step.edge.child = child;
      if (edge == nullptr) {
        nodes[place].add(std::move(step.edge));
      } else {  // another object at the address of one that is no more
        dropped.push_back(std::move(edge->weak));
        edge->weak = std::move(step.edge.weak);
        edge->child = child;
      }
      place = child;
    } else {
      place = edge->child;
    }
  }
  if (nodes[place].read != Read::kEnd) {
    return false;
  }
  nodes[place].number = number;
  return true;
}

}  // namespace

uint64_t recognise(PyObject* callable) {
  if (callable == Py_None) {
    return kIdentity;
  }
  Walk walk(callable);  // ends after the lock is free again
  Lock const lock;
  if (nodes.empty()) {
    return 0;
  }
  ++walks;
  size_t place = 0;
  while (nodes[place].read != Read::kEnd) {
    Edge const* const edge = walk.follow(nodes[place]);
    if (edge == nullptr) {
      --walks;
      return 0;
    }
    place = edge->child;
  }
  --walks;
  uint64_t const number = nodes[place].number;
  hits += number != 0;
  return number;
}

uint64_t new_number() {
  Lock const lock;
  return ++numbers;
}

bool learn(PyObject* trail, uint64_t number) {
  std::vector<Step> steps;
  if (!PyList_Check(trail)) {
    PyErr_SetString(PyExc_TypeError, "a trail is a list");
    return false;
  }
  if (partial_type == nullptr || parse_trail(trail, steps) != Parsed::kSteps || steps.size() >= kNodesLimit) {
    return false;
  }
  std::vector<Node> former;  // both are dropped after the lock is free again
  std::vector<PyRef> dropped;
  Lock const lock;
  if (walks != 0) {
    return false;
  }
  if (nodes.size() + steps.size() + 1 > kNodesLimit) {
    std::swap(nodes, former);
  }
  if (nodes.empty()) {
    nodes.emplace_back();
  }
  return add_path(steps, number, dropped);
}

bool learn_types(PyObject* partial, PyObject* epilogue) {
  PyRef const function = PyRef::steal(PyObject_GetAttrString(partial, "func"));
  PyRef const arguments = PyRef::steal(PyObject_GetAttrString(partial, "args"));
  PyRef const keywords = PyRef::steal(PyObject_GetAttrString(partial, "keywords"));
  if (!function || !arguments || !keywords) {
    return false;
  }
  for (PyRef const* const descriptor : {&function, &arguments, &keywords}) {
    if (Py_TYPE(descriptor->get()) != &PyMemberDescr_Type || !PyType_Check(epilogue)) {
      PyErr_SetString(PyExc_TypeError, "functools.partial has to be C's, and an Epilogue's type a class");
      return false;
    }
  }
  name_expression = PyUnicode_InternFromString("expression");
  name_operand_count = PyUnicode_InternFromString("operand_count");
  name_modules = PyUnicode_InternFromString("_modules");
  name_parameters = PyUnicode_InternFromString("_parameters");
  name_buffers = PyUnicode_InternFromString("_buffers");
  name_forward = PyUnicode_InternFromString("forward");
  partial_function = Py_NewRef(function.get());
  partial_arguments = Py_NewRef(arguments.get());
  partial_keywords = Py_NewRef(keywords.get());
  epilogue_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(epilogue));
  partial_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(partial));
  return name_expression != nullptr && name_operand_count != nullptr && name_modules != nullptr &&
         name_parameters != nullptr && name_buffers != nullptr && name_forward != nullptr;
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
  std::vector<Node> former;
  Lock const lock;
  if (walks == 0) {
    std::swap(nodes, former);
  }
}

CallableCounts callable_counts() {
  Lock const lock;
  return {nodes.size(), numbers - kIdentity, hits};
}

}  // namespace cutfuse::call
