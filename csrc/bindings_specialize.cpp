// Kernels with a program compiled in: part of every build.
#include <optional>
#include <utility>
#include <variant>

#include "bindings.h"
#include "launch/launcher.h"
#include "specialize/specialization.h"

namespace cutfuse::bindings {
namespace {

namespace sp = cutfuse::specialize;

using Compile = py::typing::Callable<py::int_(py::str, py::int_, Program, py::typing::List<py::int_>)>;

// A Python function in the driver's place: it is given the kernel, the device, the program and its operands' types, and
// gives what is launched as a number.
class FakeCompiler final : public sp::KernelCompiler {
 public:
  explicit FakeCompiler(Compile compile) : compile_(std::move(compile)) {}

  std::string why_not() const override { return {}; }

  void const* compile(std::string_view kernel, int device, Program const& program,
                      sp::OperandTypes const& types) override {
    py::gil_scoped_acquire const gil;
    py::list codes;
    for (int k = 0; k < program.operand_count; ++k) codes.append(static_cast<int>(types[k].dtype));
    try {
      return pointer<void const>(compile_(kernel, device, program, codes).cast<uintptr_t>());
    } catch (py::error_already_set const& error) {
      throw std::runtime_error(error.what());
    }
  }

 private:
  Compile compile_;
};

void fake_compiler(std::optional<Compile> const& compile) {
  static FakeCompiler* fake = nullptr;
  sp::use_kernel_compiler(nullptr);
  delete std::exchange(fake, compile ? new FakeCompiler(*compile) : nullptr);
  sp::use_kernel_compiler(fake);
}

sp::Specialization* find_specialization(std::string const& kernel, int device, Program const& program,
                                        std::vector<DType> const& dtypes, std::vector<sp::OperandKind> const& kinds) {
  return sp::find_specialization(kernel, device, program, to_operand_types(program, dtypes, kinds));
}

std::vector<sp::OperandKind> operand_kinds_of(sp::Specialization const& specialization) {
  return kinds_of(specialization.operand_count(), specialization.operand_types());
}

std::string describe(sp::Specialization const& specialization) {
  std::string const failure = specialization.failure();
  char const* const state = specialization.loaded() != nullptr ? "compiled" : failure.empty() ? "waiting" : "failed";
  return "<" + specialization.kernel() + " on device " + std::to_string(specialization.device()) + ", " + state + ">";
}

}  // namespace

void check_epilogues(char const* function, LinearPlan const& plan, SpecializedEpilogues const& epilogues) {
  if (epilogues.empty()) return;
  std::vector<std::string> kernels;
  for (Launch const& launch : plan.launches) {
    auto const* const product = std::get_if<FusedProduct>(&launch);
    if (product != nullptr) kernels.push_back(sp::epilogue_kernel(plan, *product));
    if (std::holds_alternative<PointwisePass>(launch)) kernels.push_back(specialized_template(plan.request.input));
    if (std::holds_alternative<ReductionPass>(launch)) {
      kernels.push_back(reduce_template(ReducePath::kRows, plan.request.input, plan.request.reduction));
    }
  }
  bool fits = kernels.size() == epilogues.size();
  for (size_t k = 0; fits && k < kernels.size(); ++k) {
    fits = epilogues[k] != nullptr && epilogues[k]->kernel() == kernels[k];
  }
  if (fits) return;
  std::string wanted;
  for (std::string const& kernel : kernels) wanted += (wanted.empty() ? "" : ", ") + kernel;
  throw py::value_error(std::string(function) + ": specialized epilogues have to be of the plan's kernels, " + wanted);
}

void bind_specialize(py::module_& module) {
  py::enum_<sp::Mode> mode(module, "SpecializationMode", "What is asked for of specialized epilogues.");
  for (int value = 0; value < sp::kModeCount; ++value) {
    mode.value(sp::name_of(static_cast<sp::Mode>(value)), static_cast<sp::Mode>(value));
  }
  module.def("specialization_mode", &sp::mode, "This thread's mode where it has one, and the process's elsewhere.");
  module.def("process_specialization_mode", &sp::process_mode);
  module.def("set_process_specialization_mode", &sp::set_process_mode, py::arg("mode"));
  module.def("thread_specialization_mode", &sp::thread_mode, "None where this thread follows the process.");
  module.def("set_thread_specialization_mode", &sp::set_thread_mode, py::arg("mode").none(true));

  py::enum_<sp::OperandKind>(module, "OperandKind", "How a kernel with a program compiled in takes an operand.")
      .value("strided", sp::OperandKind::kStrided)
      .value("scalar", sp::OperandKind::kScalar)
      .value("row", sp::OperandKind::kRow)
      .value("column", sp::OperandKind::kColumn)
      .value("source", sp::OperandKind::kSource);

  py::class_<sp::Specialization, std::unique_ptr<sp::Specialization, py::nodelete>>(
      module, "Specialization",
      "A kernel with a program compiled in, on one device: one for all numbers of the program.")
      .def_property_readonly("kernel", &sp::Specialization::kernel)
      .def_property_readonly("device", &sp::Specialization::device)
      .def_property_readonly("operand_kinds", &operand_kinds_of, "How the kernel takes each operand.")
      .def("claim", &sp::Specialization::claim, "True for the first who asks, and who is to have the kernel compiled.")
      .def_property_readonly("is_claimed", &sp::Specialization::is_claimed)
      .def_property_readonly("is_pending", &sp::Specialization::is_pending,
                             "Whether compiling has been neither done nor tried.")
      .def_property_readonly(
          "is_ready", [](sp::Specialization const& specialization) { return specialization.loaded() != nullptr; },
          "Whether launches take the compiled kernel.")
      .def_property_readonly("failure", &sp::Specialization::failure,
                             "Why the kernel could not be compiled; empty before that, and where it could.")
      .def_property_readonly("seconds", &sp::Specialization::seconds, "What compiling took; 0 before.")
      .def(
          "compile", [](sp::Specialization& specialization) { return specialization.compile(sp::kernel_compiler()); },
          py::call_guard<py::gil_scoped_release>(),
          "Compiles the kernel, unless that has been done or tried; whether it is there now.")
      .def("__repr__", &describe);
  module.def(
      "find_specialization", &find_specialization, py::arg("kernel"), py::arg("device"), py::arg("program"),
      py::arg("operand_types"), py::arg("operand_kinds") = std::vector<sp::OperandKind>(),
      py::return_value_policy::reference,
      "The one specialization of these, made now if there is none yet. None beyond most_specializations, and for "
      "a program that no kernel interprets. Operands are strided unless kinds are given.");
  module.def(
      "find_epilogues",
      [](LinearPlan const& plan, int device, Program const& program, std::vector<Operand> const& operands) {
        return find_epilogues(plan, device, program, to_operands(program, operands));
      },
      py::arg("plan"), py::arg("device"), py::arg("program"), py::arg("operands"), py::return_value_policy::reference,
      "The program in the kernel of each product of a plan, or of the pass behind cuBLAS's; empty where they interpret "
      "it for good. Operands of which the address is not known yet have address 0, and are taken for aligned.");
  module.def(
      "why_not_specialized", [] { return sp::kernel_compiler().why_not(); },
      "Why no program can be compiled into a kernel; empty where it can.");
  module.def("set_stalled", &sp::set_stalled, py::arg("stalled"),
             "Whether specializations are queued that no thread compiles: calls that wait for one try again.");
  module.def("specialization_count", &sp::specialization_count);
  module.def("compiled_count", &sp::compiled_count, "How many specializations are compiled.");
  module.attr("most_specializations") = sp::kMostSpecializations;
  module.def(
      "use_compiler", &fake_compiler, py::arg("compile").none(true),
      "Gives compile(kernel, device, program, operand types) what the driver would compile; None gives it to the "
      "driver again. For tests.");
  module.def("forget_specializations", &sp::forget_specializations, "Forgets all of them, and frees none. For tests.");
}

}  // namespace cutfuse::bindings
