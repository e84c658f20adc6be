#include <map>

#include "bindings.h"
#include "call/callables.h"

namespace cutfuse::bindings {
namespace {

bool learn_callable(py::object const& trail, uint64_t number) {
  bool const learnt = call::learn(trail.ptr(), number);
  if (!learnt && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return learnt;
}

void learn_types(py::type const& partial, py::type const& epilogue) {
  if (!call::learn_types(partial.ptr(), epilogue.ptr())) {
    throw py::error_already_set();
  }
}

std::map<std::string, uint64_t> callable_counts() {
  call::CallableCounts const counts = call::callable_counts();
  return {{"nodes", counts.nodes}, {"numbers", counts.numbers}, {"hits", counts.hits}};
}

}  // namespace

void bind_callables(py::module_& module) {
  module.def(
      "recognise", [](py::object const& callable) { return call::recognise(callable.ptr()); }, py::arg("callable"),
      "A number that stands for what a callable computes, 0 where it is not known. None is 1.");
  module.def("new_callable_number", &call::new_number, "A number that no callable has had.");
  module.def("learn_callable", &learn_callable, py::arg("trail"), py::arg("number"),
             "Has recognise give the number for callables that read what a trail says; False where that cannot be.");
  module.def("learn_callable_types", &learn_types, py::arg("partial"), py::arg("epilogue"),
             "Tells recognise the types whose values it looks into.");
  module.def(
      "class_version",
      [](py::type const& type) { return call::class_version(reinterpret_cast<PyTypeObject*>(type.ptr())); },
      py::arg("type"), "A number that a class has until anything about it or a base changes; 0 where it has none.");
  module.def("forget_callables", &call::forget_callables, "Forgets what callables are known. Numbers are not reused.");
  module.def("callable_counts", &callable_counts, "How many nodes, numbers and hits recognise has had.");
}

}  // namespace cutfuse::bindings
