// The direct path of the public functions and the operators: its plans, what it is told about PyTorch, and callables.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "bindings.h"
#include "call/arguments.h"
#include "call/call_plan.h"
#include "call/callables.h"
#include "call/calls.h"
#include "call/torch_state.h"
#include "call/training.h"

namespace cutfuse::bindings {

// Sizes, strides and torch.dtype.
template <>
struct Conversion<call::ResultLayout> {
  using Integers = py::typing::Tuple<py::int_, py::ellipsis>;
  using Given = std::tuple<Integers, Integers, py::object>;
  static call::ResultLayout to(Given const& given) {
    using call::PyRef;
    auto const& [sizes, strides, dtype] = given;
    return {PyRef::share(sizes.ptr()), PyRef::share(strides.ptr()), PyRef::share(dtype.ptr())};
  }
};

// As PyTorch takes the shape of a workspace; null for none.
call::PyRef sizes_of(int64_t bytes) {
  return bytes > 0 ? call::PyRef::share(py::make_tuple(bytes).ptr()) : call::PyRef();
}

// The problem, bytes of workspace, and the result.
template <>
struct Conversion<call::GradientSum> {
  using Given = std::tuple<ReduceProblem, int64_t, call::ResultLayout>;
  static call::GradientSum to(Given const& given) {
    auto const& [problem, workspace_bytes, result] = given;
    return {problem, sizes_of(workspace_bytes), result};
  }
};

// Where it is stored, and how it is summed.
template <>
struct Conversion<call::GradientOutput>
    : FieldsConversion<call::GradientOutput, call::ResultLayout, std::optional<call::GradientSum>> {};

// The layout of the partial sums, and how they are summed.
template <>
struct Conversion<call::ColumnSum> : FieldsConversion<call::ColumnSum, call::ResultLayout, call::GradientSum> {};

namespace {

using call::CallKey;
using call::CallPlan;
using call::Function;
using call::PyRef;
using call::ResultLayout;

CallPlan make_plan(call::Steps steps, ResultLayout const& result = {}, int64_t workspace_bytes = 0) {
  return {std::move(steps), result, sizes_of(workspace_bytes)};
}

call::LinearSteps steps_of(std::string const& function, LinearPlan const& plan, SpecializedEpilogues const& epilogues) {
  check_epilogues(function.c_str(), plan, epilogues);
  call::LinearSteps steps;
  steps.plan = plan;
  steps.epilogues = epilogues;
  return steps;
}

CallPlan linear_call(LinearPlan const& plan, Program const& program, std::vector<Operand> const& operands,
                     SpecializedEpilogues const& epilogues, ResultLayout const& result, bool has_planes,
                     std::optional<py::object> const& multiply, std::optional<ResultLayout> const& pre_activation) {
  if (plan.reads_weight_planes && !has_planes) {
    throw py::value_error("linear_call: the plan reads planes of the weight, and the call has none");
  }
  if (plan.is_fused() && plan.request.stores_pre_activation != pre_activation.has_value()) {
    throw py::value_error("linear_call: a layout of the pre-activation is needed only where a kernel stores it");
  }
  call::LinearSteps steps = steps_of("linear_call", plan, epilogues);
  steps.program = program;
  steps.operands = to_operands(program, operands);
  steps.has_planes = has_planes;
  if (multiply) steps.multiply = PyRef::share(multiply->ptr());
  if (pre_activation) steps.pre_activation = *pre_activation;
  return make_plan(std::move(steps), result, plan.workspace_bytes);
}

CallPlan joined_call(LinearPlan const& plan, std::vector<bool> const& has_bias, ResultLayout const& result) {
  if (!plan.is_fused() || plan.request.joined_rows.size() != has_bias.size() || has_bias.size() > kMostJoinedWeights) {
    throw py::value_error("joined_call: the plan joins " + std::to_string(plan.request.joined_rows.size()) +
                          " weights by a kernel, got " + std::to_string(has_bias.size()));
  }
  return make_plan(call::JoinedSteps{plan, has_bias}, result);
}

CallPlan pointwise_call(PointwiseProblem const& problem, ResultLayout const& result,
                        OptionalSpecialization const& specialization) {
  return make_plan(call::PointwiseSteps{problem, specialization.value_or(nullptr)}, result);
}

CallPlan reduce_call(ReduceProblem const& problem, ResultLayout const& result, int64_t workspace_bytes,
                     OptionalSpecialization const& specialization) {
  return make_plan(call::ReduceSteps{problem, specialization.value_or(nullptr)}, result, workspace_bytes);
}

// Of a tensor that has to be like the one at registration.
call::TensorFacts facts_of(py::object const& tensor) {
  call::TensorFacts facts;
  if (!call::torch_state().read(tensor.ptr(), facts)) throw py::value_error("training_plan: a tensor has no memory");
  return facts;
}

call::GradientSteps steps_of(std::string const& function, PointwiseBackwardProblem const& problem,
                             std::vector<call::GradientOutput> const& outputs,
                             std::optional<call::ColumnSum> const& column_sum,
                             OptionalSpecialization const& specialization) {
  if (outputs.size() != static_cast<size_t>(problem.derivative_count)) {
    throw py::value_error(function + ": the problem has " + std::to_string(problem.derivative_count) +
                          " outputs, got " + std::to_string(outputs.size()));
  }
  return {problem, outputs, column_sum, specialization.value_or(nullptr)};
}

// Has a gradient stored in the input that it is of. The kernel reads x once, and operands anew for each gradient.
void store_in_place(call::GradientSteps& steps, int wrt) {
  PointwiseBackwardProblem const& problem = steps.problem;
  WantedDerivative const* const end = problem.derivatives + problem.derivative_count;
  auto const* const found =
      std::find_if(problem.derivatives, end, [&](WantedDerivative const& own) { return own.wrt == wrt; });
  if (found == end || (wrt > 0 && found + 1 != end)) {
    throw py::value_error("backward_call: the gradients that may be in place are x's and the last one, got " +
                          std::to_string(wrt));
  }
  Operand const& input = wrt > 0 ? problem.operands.items[wrt - 1] : problem.x;
  Operand const dense = contiguous(nullptr, input.dtype, problem.extents);
  auto const& [outer, rows, columns] = problem.extents;
  int64_t const extents[] = {outer, rows, columns};
  for (int d = 0; d < 3; ++d) {
    if (extents[d] > 1 && input.strides[d] != dense.strides[d]) {
      throw py::value_error("backward_call: an input with a gradient in its place has to be contiguous");
    }
  }
  call::GradientOutput& output = steps.outputs[static_cast<size_t>(found - problem.derivatives)];
  if (output.sum || found->dtype != input.dtype) {
    throw py::value_error("backward_call: an input with a gradient in its place has to be of its shape and type");
  }
  output.in_place = true;
}

CallPlan backward_call(PointwiseBackwardProblem const& problem, std::vector<call::GradientOutput> const& outputs,
                       std::optional<call::ColumnSum> const& column_sum, OptionalSpecialization const& specialization,
                       std::vector<int> const& in_place) {
  if ((problem.is_accurate || problem.reduction != Reduction::kNone) && specialization) {
    throw py::value_error("backward_call: behind a reduction the program is interpreted: specialization must be None");
  }
  if (column_sum && problem.extents.outer != 1) {
    throw py::value_error("backward_call: columns are summed of a matrix, and the outer extent is " +
                          std::to_string(problem.extents.outer));
  }
  call::GradientSteps steps = steps_of("backward_call", problem, outputs, column_sum, specialization);
  for (int const wrt : in_place) store_in_place(steps, wrt);
  return make_plan(std::move(steps));
}

// The plan of a product, what z's gradient is multiplied by, whether that comes first, and the layout of the result.
using BackwardProductTuple = std::tuple<LinearPlan, py::object, bool, ResultLayout>;

std::optional<call::BackwardProduct> to_backward_product(std::optional<BackwardProductTuple> const& given) {
  if (!given) return std::nullopt;
  auto const& [plan, factor, factor_first, result] = *given;
  if (!plan.is_fused()) throw py::value_error("training_plan: the products of a backward pass are kernels of ours");
  if (plan.reads_weight_planes) throw py::value_error("training_plan: the products of a backward pass read no planes");
  return call::BackwardProduct{steps_of("training_plan", plan, {}), facts_of(factor), factor_first, result};
}

int64_t workspace_bytes_of(std::optional<call::BackwardProduct> const& product) {
  return product ? product->steps.plan.workspace_bytes : 0;
}

py::object training_plan(CallPlan const& forward, py::object const& z, std::vector<py::object> const& operand_tensors,
                         PointwiseBackwardProblem const& problem, std::vector<bool> const& is_read,
                         std::vector<call::GradientOutput> const& outputs,
                         std::optional<call::ColumnSum> const& column_sum, OptionalSpecialization const& backward,
                         Program const& identity, std::optional<BackwardProductTuple> const& grad_x,
                         std::optional<BackwardProductTuple> const& grad_weight, bool hands_gradient_on) {
  check_operand_count(problem.program, operand_tensors.size());
  if (is_read.size() != operand_tensors.size()) {
    throw py::value_error("training_plan: " + std::to_string(operand_tensors.size()) + " operands, and " +
                          std::to_string(is_read.size()) + " flags of which are read");
  }
  auto const* const product = std::get_if<call::LinearSteps>(&forward.steps);
  if (product == nullptr || product->plan.request.stores_pre_activation == hands_gradient_on) {
    throw py::value_error(
        "training_plan: the forward pass has to be a linear_call that stores the pre-activation unless the gradient is "
        "handed on");
  }
  if (problem.derivative_count == 0 || problem.derivatives[0].wrt != 0) {
    throw py::value_error("training_plan: z's gradient is first");
  }
  call::TrainingPlan plan = {};
  plan.forward = forward;
  plan.z = facts_of(z);
  for (py::object const& tensor : operand_tensors) plan.operand_facts.push_back(facts_of(tensor));
  plan.is_read = is_read;
  plan.gradients = steps_of("training_plan", problem, outputs, column_sum, backward);
  plan.hands_gradient_on = hands_gradient_on;
  plan.identity = identity;
  plan.grad_x = to_backward_product(grad_x);
  plan.grad_weight = to_backward_product(grad_weight);
  plan.backward_workspace_sizes =
      sizes_of(std::max(workspace_bytes_of(plan.grad_x), workspace_bytes_of(plan.grad_weight)));
  PyObject* const handle = call::wrap(std::move(plan));
  if (handle == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(handle);
}

CallPlan training_call(py::object const& apply, py::object const& plan, SpecializedEpilogues const& epilogues) {
  return make_plan(call::TrainingSteps{PyRef::share(apply.ptr()), PyRef::share(plan.ptr()), epilogues});
}

CallPlan function_call(py::object const& function, std::vector<bool> const& is_given) {
  if (is_given.size() > call::Arguments::kMaxTensors) throw py::value_error("function_call: too many arguments");
  return make_plan(call::FunctionSteps{PyRef::share(function.ptr()), is_given});
}

CallPlan operation_call(py::object const& function, std::vector<int> const& arguments) {
  if (arguments.size() > call::Arguments::kMaxTensors) throw py::value_error("operation_call: too many arguments");
  for (int const k : arguments) {
    if (k < 0 || k > kMaxOperands) throw py::value_error("operation_call: no tensor " + std::to_string(k));
  }
  return make_plan(call::OperationSteps{PyRef::share(function.ptr()), arguments});
}

CallPlan product_call() { return make_plan(call::ProductSteps{}); }

void connect(std::optional<py::typing::Dict<py::str, py::object>> const& functions) {
  call::torch_state().disconnect();
  call::plan_table().clear();  // keys of another reader's words mean something else
  if (functions && !call::torch_state().connect(functions->ptr())) throw py::error_already_set();
}

using Objects = py::typing::Tuple<py::object, py::ellipsis>;

std::optional<CallKey> read_key(Function function, Objects const& arguments, uint64_t callable) {
  CallKey key;
  if (!call::read_key(function, arguments.ptr(), callable, key)) return std::nullopt;
  return key;
}

bool remember(Function function, Objects const& arguments, uint64_t callable, CallKey const& before,
              CallPlan const& plan) {
  return call::remember_call(function, arguments.ptr(), callable, before, plan);
}

void raise_unless(bool is_done) {
  if (!is_done) {
    throw py::error_already_set();
  }
}

std::map<std::string, uint64_t> callable_counts() {
  call::CallableCounts const counts = call::callable_counts();
  return {{"keys", counts.keys}, {"numbers", counts.numbers}, {"hits", counts.hits}};
}

// How many tensors a call of kernels has; 0 where the plan hands on however many there are.
size_t count_tensors(CallPlan const& plan, int first_operand) {
  if (auto const* const steps = std::get_if<call::JoinedSteps>(&plan.steps)) {
    auto const biases = std::count(steps->has_bias.begin(), steps->has_bias.end(), true);
    return 1 + steps->has_bias.size() + static_cast<size_t>(biases);
  }
  if (auto const* const steps = std::get_if<call::FunctionSteps>(&plan.steps)) {
    return static_cast<size_t>(std::count(steps->is_given.begin(), steps->is_given.end(), true));
  }
  auto const before = static_cast<size_t>(first_operand);
  if (auto const* const steps = std::get_if<call::GradientSteps>(&plan.steps)) {
    Reduction const reduction = steps->problem.reduction;
    return before + steps->problem.program.operand_count + needs_result(reduction) + counts_ties(reduction);
  }
  if (auto const* const steps = std::get_if<call::LinearSteps>(&plan.steps)) {
    return before + steps->program.operand_count + steps->has_planes;
  }
  if (auto const* const steps = std::get_if<call::PointwiseSteps>(&plan.steps)) {
    return before + steps->problem.program.operand_count;
  }
  auto const* const steps = std::get_if<call::ReduceSteps>(&plan.steps);
  return steps == nullptr ? 0 : before + steps->problem.program.operand_count;
}

py::object run_call(CallPlan const& plan, std::vector<py::object> const& tensors, int first_operand, int device) {
  size_t const expected = count_tensors(plan, first_operand);
  if ((expected > 0 && tensors.size() != expected) || tensors.size() > call::Arguments::kMaxTensors) {
    throw py::value_error("run_call: the plan is of " + std::to_string(expected) + " tensors, got " +
                          std::to_string(tensors.size()));
  }
  std::vector<PyObject*> given;
  given.reserve(tensors.size());
  for (py::object const& tensor : tensors) given.push_back(tensor.ptr());
  PyObject* const result = call::run_plan(plan, given.data(), static_cast<int>(given.size()), first_operand, device);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace

void bind_calls(py::module_& module) {
  for (PyMethodDef const* function = call::call_functions(); function->ml_name != nullptr; ++function) {
    // The C API takes a pointer that is not const, and does not write.
    auto* const definition = const_cast<PyMethodDef*>(function);
    module.add_object(function->ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(definition, nullptr)));
  }
  py::enum_<Function>(module, "CallFunction", "A public function or an operator with a direct path.")
      .value("linear", Function::kLinear)
      .value("pointwise", Function::kPointwise)
      .value("reduce", Function::kReduce)
      .value("mlp", Function::kMlp)
      .value("linear_operator", Function::kLinearOperator)
      .value("pointwise_operator", Function::kPointwiseOperator)
      .value("reduce_operator", Function::kReduceOperator)
      .value("backward_operator", Function::kBackwardOperator)
      .value("joined_operator", Function::kJoinedOperator);
  py::class_<CallKey>(module, "CallKey", "All that the plan of a call depends on.");
  py::class_<CallPlan>(module, "CallPlan", "What a call whose key is known does.");
  module.def("general_call", [] { return CallPlan{}; }, "The plan of calls that take the general path every time.");
  module.def("product_call", &product_call, "The plan of PyTorch's own linear layer.");
  module.def("operation_call", &operation_call, py::arg("function"), py::arg("arguments"),
             "PyTorch's own linear layer, then function(*arguments): 0 for the layer's result, k for operand k - 1.");
  module.def("function_call", &function_call, py::arg("function"), py::arg("is_given"),
             "A function of a call's tensors. is_given: of its arguments, which are tensors; the others are None.");
  module.def("linear_call", &linear_call, py::arg("plan"), py::arg("program"), py::arg("operands"),
             py::arg("epilogues"), py::arg("result"), py::arg("has_planes") = false, py::arg("multiply") = py::none(),
             py::arg("pre_activation") = py::none(),
             "An operand is as in PointwiseProblem, a result (sizes, strides, torch.dtype). has_planes: "
             "of the weight, which the plan may read, as the call's last tensor. multiply: computes cuBLAS's product "
             "of (x, weight, bias or None) in place of F.linear. pre_activation: its layout, where a kernel stores it; "
             "a call whose plan stores it gives (result, pre-activation).");
  module.def("joined_call", &joined_call, py::arg("plan"), py::arg("has_bias"), py::arg("result"),
             "Of the products of x with several weights, side by side; has_bias: of each weight.");
  module.def("training_call", &training_call, py::arg("apply"), py::arg("plan"),
             py::arg("epilogues") = SpecializedEpilogues(),
             "apply(plan, x, weight, bias, *operands), of an autograd.Function. epilogues: the program in the kernels "
             "of its passes, for which a capture waits.");
  module.def(
      "training_plan", &training_plan, py::arg("forward"), py::arg("z"), py::arg("operand_tensors"), py::arg("problem"),
      py::arg("is_read"), py::arg("outputs"), py::arg("column_sum"), py::arg("backward"), py::arg("identity"),
      py::arg("grad_x"), py::arg("grad_weight"), py::arg("hands_gradient_on"),
      "What training_forward and training_backward take: of y = program(z, operands) over tensors like these. forward: "
      "the plan of a linear_call. problem: of the gradients, where z's first element stands for operands that are not "
      "read; is_read: which are. An output is (layout of a result, None or how it is summed: a ReduceProblem, bytes of "
      "workspace, the sum's layout); column_sum is None or (partials' layout, how they are summed). "
      "backward: the derivatives in the kernel of the backward pass. grad_x, grad_weight: the products of the backward "
      "pass, each None where PyTorch multiplies, or (a fused plan of z's gradient and another tensor, that tensor, "
      "whether it is the first of the two, the layout of the result); identity is their program. hands_gradient_on: "
      "the program adds operands, so that all outputs are the gradient that arrives; the partial sums are then that "
      "gradient's rows.");
  module.def("pointwise_call", &pointwise_call, py::arg("problem"), py::arg("result"), py::arg("specialization"),
             "specialization: the program in the kernel that runs the problem; None to interpret it.");
  module.def("reduce_call", &reduce_call, py::arg("problem"), py::arg("result"), py::arg("workspace_bytes"),
             py::arg("specialization"), "As pointwise_call.");
  module.def("backward_call", &backward_call, py::arg("problem"), py::arg("outputs"), py::arg("column_sum"),
             py::arg("specialization"), py::arg("in_place") = std::vector<int>(),
             "outputs, of each of the problem's, and column_sum as of training_plan. The reduction's result and ties, "
             "where it needs them, are tensors behind the operands. in_place: the inputs in whose memory their "
             "gradients are stored, x and that of the last output alone.");
  module.def("run_call", &run_call, py::arg("plan"), py::arg("tensors"), py::arg("first_operand"), py::arg("device"),
             "What a plan gives for tensors laid out as those that it was made for, in the order of the call's "
             "arguments, on the current stream of their device, which is the current one; None for general_call's.");
  module.def("connect_calls", &connect, py::arg("functions").none(true),
             "What direct calls ask PyTorch, by name; None makes every call the general path's. Forgets all plans.");
  module.def("call_key", &read_key, py::arg("function"), py::arg("arguments"), py::arg("callable"),
             "The key of a call with these arguments, as things are now; None where it has none.");
  module.def("remember_call", &remember, py::arg("function"), py::arg("arguments"), py::arg("callable"),
             py::arg("before"), py::arg("plan"),
             "Puts a plan into the table for calls with these arguments. before: their key before the plan was made. "
             "False where it is another by now.");
  module.def("forget_calls", [] { call::plan_table().clear(); }, "Empties the table of plans.");
  module.def("remembered_calls", [] { return call::plan_table().size(); }, "How many plans the table holds.");
  module.def("direct_calls", &call::direct_calls, "How many calls ran directly since the process began.");
  module.def("pause_calls", &call::pause_calls, py::arg("paused"),
             "Makes every call the general path's, until it is called with False as often as with True.");
}

void bind_callables(py::module_& module) {
  module.def(
      "recognise", [](py::object const& callable) { return call::recognise(callable.ptr()); }, py::arg("callable"),
      "A number that stands for what a callable computes, 0 where it is not known. None is 1.");
  module.def(
      "number_callable",
      [](py::object const& callable) {
        py::object found = py::reinterpret_steal<py::object>(call::number_of(callable.ptr()));
        raise_unless(static_cast<bool>(found));
        return found;
      },
      py::arg("callable"), "The number, which a callable has from now on; or what learn_fact has to be told first.");
  module.def("new_callable_number", &call::new_number, "A number that no callable has had.");
  module.def(
      "learn_fact",
      [](py::str const& name, Objects const& facts) { raise_unless(call::learn_fact(name.ptr(), facts.ptr())); },
      py::arg("name"), py::arg("facts"), "Takes what the walk through a callable has to know.");
  module.def(
      "learn_language",
      [](py::typing::Dict<py::object, py::object> const& known, py::object const& hooks, Objects const& types) {
        raise_unless(call::learn_language(known.ptr(), hooks.ptr(), types.ptr()));
      },
      py::arg("known"), py::arg("hooks"), py::arg("types"), "Tells what the walk through callables looks for.");
  module.def(
      "class_version",
      [](py::type const& type) { return call::class_version(reinterpret_cast<PyTypeObject*>(type.ptr())); },
      py::arg("type"), "A number that a class has until anything about it or a base changes; 0 where it has none.");
  module.def("forget_callables", &call::forget_callables, "Forgets what callables are known. Numbers are not reused.");
  module.def("callable_counts", &callable_counts, "How many keys there are, and how many numbers and hits there were.");
}

}  // namespace cutfuse::bindings
