// The Python module cutfuse._C.
#include "bindings.h"

#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/build_info.h"
#include "epilogue/ops.h"
#include "epilogue/program.h"

namespace cutfuse::bindings {
namespace {

using InstructionTuple = std::tuple<int, int, int, int, int, double, double>;  // op, a, b, c, slot, immediates

uint8_t to_byte(int value, char const* field, size_t index) {
  if (value < 0 || value > 255) {
    throw py::value_error("instruction " + std::to_string(index) + ": " + field + " has to be in 0..255, got " +
                          std::to_string(value));
  }
  return static_cast<uint8_t>(value);
}

Instruction to_instruction(InstructionTuple const& fields, size_t index) {
  Instruction instruction = {};
  instruction.op = to_byte(std::get<0>(fields), "op", index);
  instruction.a = to_byte(std::get<1>(fields), "a", index);
  instruction.b = to_byte(std::get<2>(fields), "b", index);
  instruction.c = to_byte(std::get<3>(fields), "c", index);
  instruction.slot = to_byte(std::get<4>(fields), "slot", index);
  instruction.immediate[0] = static_cast<float>(std::get<5>(fields));
  instruction.immediate[1] = static_cast<float>(std::get<6>(fields));
  return instruction;
}

Program make_program(std::vector<InstructionTuple> const& instructions, int operand_count, bool is_eager) {
  if (instructions.size() > static_cast<size_t>(kMaxInstructions)) {
    throw py::value_error("a program has at most " + std::to_string(kMaxInstructions) + " instructions, got " +
                          std::to_string(instructions.size()));
  }
  Program program = {};
  program.length = static_cast<int32_t>(instructions.size());
  program.operand_count = operand_count;
  for (size_t index = 0; index < instructions.size(); ++index) {
    program.instructions[index] = to_instruction(instructions[index], index);
  }
  std::string const fault = find_fault(program);
  if (!fault.empty()) throw py::value_error(fault);
  for (int index = 0; index < program.length; ++index) {
    Instruction& instruction = program.instructions[index];
    instruction.is_eager = is_eager && has_eager_formula(kOps[instruction.op]) ? 1 : 0;
  }
  complete(program);
  return program;
}

// Whether two programs run the same instructions.
bool is_same(Program const& program, Program const& other) {
  return program.length == other.length && program.operand_count == other.operand_count &&
         std::memcmp(program.instructions, other.instructions, program.length * sizeof(Instruction)) == 0;
}

std::optional<std::tuple<float, int>> scaling_of(Program const& program) {
  Scaling const scaling = find_scaling(program);
  if (!scaling.found) return std::nullopt;
  return std::make_tuple(scaling.scale, scaling.weight);
}

py::bytes bytes_of(Program const& program) { return {reinterpret_cast<char const*>(&program), sizeof(program)}; }

std::pair<int, int> pair_of_work(Work const& work) { return {work.instructions, work.special}; }

std::vector<OpInfo> op_table() { return {std::begin(kOps), std::end(kOps)}; }

std::map<std::string, int> limits() {
  return {{"instructions", kMaxInstructions}, {"operands", kMaxOperands}, {"slots", kMaxSlots}};
}

using Numbers = py::typing::Dict<py::str, py::int_>;

Numbers dtypes() {
  Numbers result;
  for (DType const dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    result[name_of(dtype)] = static_cast<int>(dtype);
  }
  return result;
}

Numbers reductions() {
  Numbers result;
  for (int value = 1; value < kReductionCount; ++value) {
    result[name_of(static_cast<Reduction>(value))] = value;
  }
  return result;
}

std::vector<ReductionInfo> reduction_table() { return {std::begin(kReductions) + 1, std::end(kReductions)}; }

void evaluate(Program const& program, uintptr_t input, uintptr_t output, int64_t count,
              std::vector<std::tuple<uintptr_t, int64_t>> const& operands, int wrt) {
  check_operand_count(program, operands.size());
  if (has_eager_formulas(program)) throw py::value_error("the host has none of PyTorch's own formulas");
  if (count < 0) throw py::value_error("count has to be at least 0, got " + std::to_string(count));
  if (wrt < -1 || wrt > program.operand_count) {
    throw py::value_error("wrt has to be in -1.." + std::to_string(program.operand_count) + ", got " +
                          std::to_string(wrt));
  }
  if (count > 0 && (input == 0 || output == 0)) throw py::value_error("input and output are null pointers");
  HostOperand host_operands[kMaxOperands] = {};
  for (size_t k = 0; k < operands.size(); ++k) {
    auto const [address, stride] = operands[k];
    if (stride != 0 && stride != 1) {
      throw py::value_error("operand " + std::to_string(k) + ": stride has to be 0 or 1, got " +
                            std::to_string(stride));
    }
    if (count > 0 && address == 0) throw py::value_error("operand " + std::to_string(k) + " is a null pointer");
    host_operands[k] = {pointer<float const>(address), stride};
  }
  py::gil_scoped_release release;
  host_evaluate(program, pointer<float const>(input), pointer<float>(output), count, host_operands, wrt);
}

void bind_epilogue(py::module_& module) {
  py::class_<OpInfo>(module, "OpInfo", "A row of ops.def.")
      .def_readonly("name", &OpInfo::name)
      .def_readonly("arity", &OpInfo::arity)
      .def_readonly("parameter_count", &OpInfo::parameter_count)
      .def_readonly("signature", &OpInfo::signature)
      .def_readonly("aliases", &OpInfo::aliases)
      .def_readonly("formula", &OpInfo::formula)
      .def_property_readonly(
          "fast_work", [](OpInfo const& op) { return pair_of_work(op.fast); },
          "Instructions of the value with the fast primitives, and the special functions among them.")
      .def_property_readonly("accurate_work", [](OpInfo const& op) { return pair_of_work(op.accurate); })
      .def_readonly("eager", &OpInfo::eager)
      .def_readonly("special", &OpInfo::special);
  module.def("op_table", &op_table, "The rows of ops.def, in the order of their codes.");
  module.def("limits", &limits, "The most instructions, operands and slots that a program has.");
  module.def("dtypes", &dtypes, "The number of each element type.");
  module.def("reductions", &reductions, "The number of each reduction.");
  py::class_<ReductionInfo>(module, "ReductionInfo", "A row of reductions.def.")
      .def_readonly("name", &ReductionInfo::name)
      .def_property_readonly("gradient", [](ReductionInfo const& info) { return name_of(info.gradient); })
      .def_property_readonly("is_additive", [](ReductionInfo const& info) { return is_additive(info.code); })
      .def_property_readonly("needs_result", [](ReductionInfo const& info) { return needs_result(info.code); });
  module.def("reduction_table", &reduction_table, "The rows of reductions.def.");
  module.def("build_info", &build_info, "What the kernels were compiled with; empty texts where there are none.");
  py::class_<Program>(module, "Program", "An epilogue program, validated.")
      .def(py::init(&make_program), py::arg("instructions"), py::arg("operand_count"), py::arg("is_eager") = false)
      .def_property_readonly("operand_count", [](Program const& program) { return program.operand_count; })
      .def_property_readonly("cost", &cost_of)
      .def("specialized_cost", &specialized_cost_of, py::arg("is_accurate"),
           "What the program takes that is compiled into a kernel, with accurate primitives or fast ones.")
      .def_property_readonly(
          "generated_cost", &generated_cost_of,
          "What the program takes of a kernel that torch.compile generates, in the units of specialized_cost.")
      .def_property_readonly("is_interpreted", &is_interpreted, "Whether kernels interpret it, unless specialized.")
      .def_property_readonly(
          "without_chain", [](Program const& program) { return without_chain(program); },
          "The same program for kernels that have no chain compiled in, but interpret each.")
      .def_property_readonly("scaling", &scaling_of,
                             "(scale, weight) where it is scale * z, times operand `weight` unless that is -1.")
      .def_property_readonly("has_eager_formulas", &has_eager_formulas,
                             "Whether only a kernel with the program compiled in computes it.")
      .def("__bytes__", &bytes_of, "What a kernel is given.")
      .def("is_same", &is_same, py::arg("other"), "Whether both run the same instructions.")
      .def("__len__", [](Program const& program) { return program.length; });
  module.def("evaluate", &evaluate, py::arg("program"), py::arg("input"), py::arg("output"), py::arg("count"),
             py::arg("operands"), py::arg("wrt") = -1,
             "Runs a program on the host over fp32 values: its value (wrt -1), or its derivative with respect to the "
             "input (0) or operand wrt - 1. Pointers are integers; an operand is (pointer, stride 0 or 1).");
}

// What is kept here is the process's: a reference that another interpreter took would be one to the first one's
// objects.
bool is_in_main_interpreter() { return PyInterpreterState_Get() == PyInterpreterState_Main(); }

constexpr char const* kMainInterpreterOnly =
    "cutfuse._C is for a process's first interpreter alone, and this is a subinterpreter: call cutfuse from the first "
    "one, or from another process";

}  // namespace
}  // namespace cutfuse::bindings

// The module of the first interpreter.
PYBIND11_MODULE(_C_of_main_interpreter, module) {
  // Since Python 3.13 PyInit__C runs in the first interpreter, whichever imports.
  if (!cutfuse::bindings::is_in_main_interpreter()) {
    throw pybind11::import_error(cutfuse::bindings::kMainInterpreterOnly);
  }
  cutfuse::bindings::bind_epilogue(module);
  cutfuse::bindings::bind_plan(module);
  cutfuse::bindings::bind_specialize(module);
  cutfuse::bindings::bind_callables(module);
  cutfuse::bindings::bind_problems(module);
  cutfuse::bindings::bind_launch(module);
  cutfuse::bindings::bind_calls(module);
#if CUTFUSE_WITH_CUDA
  cutfuse::bindings::bind_kernel_text(module);
  module.attr("cuda_build") = true;
#else
  module.attr("cuda_build") = false;
#endif
}

// Before pybind11's own, which before Python 3.12 waits forever for the lock that the importing thread holds.
extern "C" PYBIND11_EXPORT PyObject* PyInit__C() {
  if (cutfuse::bindings::is_in_main_interpreter()) return PyInit__C_of_main_interpreter();
  PyErr_SetString(PyExc_ImportError, cutfuse::bindings::kMainInterpreterOnly);
  return nullptr;
}
