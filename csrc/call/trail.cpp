#include "call/trail.h"

namespace cutfuse::call {
namespace {

template <class T>
struct Name {
  char const* name;
  T value;
};

constexpr Name<Read> kReads[] = {
    {"value", Read::kValue},
    {"code", Read::kCode},
    {"default values", Read::kDefaultValues},
    {"qualname", Read::kQualname},
    {"global", Read::kGlobal},
    {"free", Read::kFree},
    {"defaults", Read::kDefaults},
    {"keyword defaults", Read::kKeywordDefaults},
    {"keywords", Read::kKeywords},
    {"hooks", Read::kHooks},
    {"attributes", Read::kAttributes},
    {"forward", Read::kForward},
    {"attribute", Read::kAttribute},
};

constexpr Name<Answer> kAnswers[] = {
    {"same", Answer::kSame},         {"code", Answer::kCode},
    {"seen", Answer::kSeen},         {"float", Answer::kFloat},
    {"int", Answer::kInt},           {"text", Answer::kText},
    {"tuple", Answer::kTuple},       {"float of type", Answer::kFloatType},
    {"partial", Answer::kPartial},   {"method", Answer::kMethod},
    {"module", Answer::kModule},     {"class", Answer::kClass},
    {"epilogue", Answer::kEpilogue}, {"depth", Answer::kDepth},
    {"place", Answer::kPlace},       {"size", Answer::kSize},
    {"names", Answer::kNames},       {"none", Answer::kNone},
};

template <class T, size_t kCount>
bool parse_name(Name<T> const (&names)[kCount], PyObject* text, T& value) {
  for (Name<T> const& item : names) {
    if (PyUnicode_CompareWithASCIIString(text, item.name) == 0) {
      value = item.value;
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
      edge.owned = Reference::to(edge.token.object);
      return Parsed::kSteps;
    case Answer::kText:
      edge.token = text_token(found);
      edge.owned = Reference::to(found);
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
      edge.owned = Reference::to(found);
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
      edge.weak = Reference(PyWeakref_NewRef(first, nullptr));
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
  step.node.argument = Reference::to(argument);
  if (step.node.read == Read::kFree) {
    step.node.index = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(argument, 0)));
  }
  return parse_answer(answer, found, step.edge);
}

}  // namespace

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

}  // namespace cutfuse::call
