#include "call/calls.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "call/arguments.h"
#include "call/call_plan.h"
#include "call/memory.h"
#include "call/training.h"
#include "launch/launcher.h"

namespace cutfuse::call {

namespace {

// Guards the table where threads run Python without a lock of the interpreter's; elsewhere that is enough.
class TableLock {
 public:
#ifdef Py_GIL_DISABLED
  TableLock() { PyMutex_Lock(&mutex); }
  ~TableLock() { PyMutex_Unlock(&mutex); }
  static inline PyMutex mutex = {};
#endif
};

std::atomic<uint64_t> direct_call_count{0};
std::atomic<int> pause_count{0};

PyRef multiply(Arguments const& arguments) {
  PyObject* const bias = arguments.has_bias ? arguments.tensors[2] : Py_None;
  return torch_state().multiply(arguments.tensors[0], arguments.tensors[1], bias);
}

// Runs the steps of a plan. Each gives the result, or null with an exception.
class Run {
 public:
  Run(CallPlan const& plan, Arguments const& arguments, Stream stream)
      : plan_(plan), arguments_(arguments), stream_(stream) {}

  PyRef operator()(GeneralSteps const&) const { return PyRef::share(Py_None); }

  PyRef operator()(ProductSteps const&) const { return multiply(arguments_); }

  PyRef operator()(OperationSteps const& steps) const {
    PyRef const z = multiply(arguments_);
    if (!z) return {};
    PyObject* given[Arguments::kMaxTensors];
    size_t count = 0;
    for (int const k : steps.arguments) {
      given[count++] = k == 0 ? z.get() : arguments_.tensors[arguments_.first_operand + k - 1];
    }
    return PyRef::steal(PyObject_Vectorcall(steps.function.get(), given, count, nullptr));
  }

  PyRef operator()(LinearSteps const& steps) const {
    return steps.plan.is_fused() ? run_fused(steps) : run_unfused(steps);
  }

  PyRef operator()(JoinedSteps const& steps) const {
    Memory result = allocate_result();
    if (!result.tensor) return {};
    TensorFacts const* const facts = arguments_.facts;
    LinearBuffers buffers = {facts[0].data, facts[1].data, nullptr, result.address, nullptr, nullptr, nullptr};
    buffers.joined.count = static_cast<int32_t>(steps.has_bias.size());
    int bias = 1 + buffers.joined.count;
    for (int k = 0; k < buffers.joined.count; ++k) {
      auto const index = static_cast<size_t>(k);
      void const* const own_bias = steps.has_bias[index] ? facts[bias++].data : nullptr;
      buffers.joined.items[k] = {facts[1 + k].data, own_bias, steps.plan.request.joined_rows[index]};
    }
    bool const done = launch([&] { launch_fused(steps.plan, buffers, {}, {}, {}, stream_); });
    return done ? std::move(result.tensor) : PyRef();
  }

  PyRef operator()(PointwiseSteps const& steps) const {
    Memory result = allocate_result();
    if (!result.tensor) return {};
    PointwiseProblem problem = steps.problem;
    problem.x.data = arguments_.facts[0].data;
    locate(problem.program, problem.operands);
    problem.out = result.address;
    problem.specialized = specialize::loaded(steps.specialization, problem.program);
    bool const done = launch([&] { launcher().pointwise(problem, stream_); });
    return done ? std::move(result.tensor) : PyRef();
  }

  PyRef operator()(TrainingSteps const& steps) const {
    return call_function(steps.apply, steps.plan.get(), operand_count());
  }

  PyRef operator()(FunctionSteps const& steps) const {
    PyObject* given[Arguments::kMaxTensors];
    size_t count = 0;
    int next = 0;
    for (bool const is_given : steps.is_given) given[count++] = is_given ? arguments_.tensors[next++] : Py_None;
    return PyRef::steal(PyObject_Vectorcall(steps.function.get(), given, count, nullptr));
  }

  PyRef operator()(ReduceSteps const& steps) const {
    Memory result = allocate_result();
    Memory workspace;
    if (!result.tensor || !allocate_workspace(workspace)) return {};
    ReduceProblem problem = steps.problem;
    problem.x.data = arguments_.facts[0].data;
    locate(problem.program, problem.operands);
    problem.out = result.address;
    problem.workspace = static_cast<float*>(workspace.address);
    problem.specialized = specialize::loaded(steps.specialization, problem.program);
    bool const done = launch([&] { launcher().reduce(problem, stream_); });
    return done ? std::move(result.tensor) : PyRef();
  }

  PyRef operator()(GradientSteps const& steps) const {
    ElementGradients gradients;
    if (!allocate_gradients(steps, arguments_.tensors + 1, gradients)) return {};
    PointwiseBackwardProblem problem = steps.problem;
    problem.grad.data = arguments_.facts[0].data;
    problem.x.data = arguments_.facts[1].data;
    locate(problem.program, problem.operands);
    TensorFacts const* behind = arguments_.facts + arguments_.first_operand + problem.program.operand_count;
    if (needs_result(problem.reduction)) problem.row_result = static_cast<float const*>((behind++)->data);
    if (counts_ties(problem.reduction)) problem.tie_count = static_cast<float const*>(behind->data);
    bool const done = launch([&] { launch_gradients(steps, problem, gradients, stream_); });
    return done ? list_of(gradients) : PyRef();
  }

 private:
  // The column sum comes last.
  static PyRef list_of(ElementGradients& gradients) {
    PyRef& column_sum = gradients.column_sum.result.tensor;
    auto const count = static_cast<Py_ssize_t>(gradients.outputs.size());
    PyRef list = PyRef::steal(PyList_New(count + (column_sum ? 1 : 0)));
    if (!list) return {};
    for (Py_ssize_t k = 0; k < count; ++k) {
      PyList_SET_ITEM(list.get(), k, take_gradient(gradients, static_cast<size_t>(k)).release());
    }
    if (column_sum) PyList_SET_ITEM(list.get(), count, column_sum.release());
    return list;
  }

  // Of a call that has nothing behind its operands.
  size_t operand_count() const { return static_cast<size_t>(arguments_.tensor_count - arguments_.first_operand); }

  Memory allocate_result() const { return allocate(plan_.result); }

  // Of a plan that has one. False, with an exception, where that failed.
  bool allocate_workspace(Memory& workspace) const {
    if (!plan_.workspace_sizes) return true;
    workspace = allocate_bytes(plan_.workspace_sizes);
    return static_cast<bool>(workspace.tensor);
  }

  void locate(Program const& program, Operands& operands) const {
    TensorFacts const* const facts = arguments_.facts + arguments_.first_operand;
    for (int k = 0; k < program.operand_count; ++k) operands.items[k].data = facts[k].data;
  }

  // Given `first`, where it is not null, x, weight, bias or None, and so many operands.
  PyRef call_function(PyRef const& function, PyObject* first, size_t operand_count) const {
    PyObject* given[Arguments::kMaxTensors + 2];
    size_t count = 0;
    if (first != nullptr) given[count++] = first;
    given[count++] = arguments_.tensors[0];
    given[count++] = arguments_.tensors[1];
    given[count++] = arguments_.has_bias ? arguments_.tensors[2] : Py_None;
    PyObject* const* const operands = arguments_.tensors + arguments_.first_operand;
    for (size_t k = 0; k < operand_count; ++k) given[count++] = operands[k];
    return PyRef::steal(PyObject_Vectorcall(function.get(), given, count, nullptr));
  }

  PyRef run_fused(LinearSteps const& steps) const {
    LinearPlan const& plan = steps.plan;
    Memory bias;
    if (!read_bias(plan, bias)) return {};
    Memory z;
    if (plan.request.stores_pre_activation) {
      z = allocate(steps.pre_activation);
      if (!z.tensor) return {};
    }
    Memory result = allocate_result();
    Memory workspace;
    if (!result.tensor || !allocate_workspace(workspace)) return {};
    LinearBuffers const buffers = {
        arguments_.facts[0].data,
        arguments_.facts[1].data,
        bias.address,
        result.address,
        workspace.address,
        plan.reads_weight_planes ? arguments_.facts[arguments_.tensor_count - 1].data : nullptr,
        z.address};
    Operands operands = steps.operands;
    locate(steps.program, operands);
    bool const done = launch([&] { launch_fused(plan, buffers, steps.program, operands, steps.epilogues, stream_); });
    return done ? results_of(plan, std::move(result), z) : PyRef();
  }

  // Where the bias lies, or a copy of it where no kernel of the plan could read it there. False, with an exception,
  // where copying it failed.
  bool read_bias(LinearPlan const& plan, Memory& bias) const {
    if (!arguments_.has_bias) return true;
    if (!plan.copies_bias) {
      bias.address = arguments_.facts[2].data;
      return true;
    }
    bias = located(torch_state().copy(arguments_.tensors[2]));
    return static_cast<bool>(bias.tensor);
  }

  PyRef run_unfused(LinearSteps const& steps) const {
    LinearPlan const& plan = steps.plan;
    Memory const z = located(steps.multiply ? call_function(steps.multiply, nullptr, 0) : multiply(arguments_));
    if (!z.tensor) return {};
    bool const in_place = plan.launches.size() < 2 || (std::holds_alternative<PointwisePass>(plan.launches[1]) &&
                                                       std::get<PointwisePass>(plan.launches[1]).in_place);
    Memory result = in_place ? z : allocate_result();
    Memory workspace;
    if (!result.tensor || !allocate_workspace(workspace)) return {};
    Operands operands = steps.operands;
    locate(steps.program, operands);
    bool const done = launch([&] {
      launch_after_product(plan, z.address, result.address, workspace.address, steps.program, operands, steps.epilogues,
                           stream_);
    });
    return done ? results_of(plan, std::move(result), z) : PyRef();
  }

  static PyRef results_of(LinearPlan const& plan, Memory result, Memory const& z) {
    if (!plan.request.stores_pre_activation) return std::move(result.tensor);
    return PyRef::steal(PyTuple_Pack(2, result.tensor.get(), z.tensor.get()));
  }

  CallPlan const& plan_;
  Arguments const& arguments_;
  Stream const stream_;
};

bool has_pending_epilogue(CallPlan const& plan) {
  auto const is_pending = [](specialize::Specialization const* found) {
    return found != nullptr && found->is_pending();
  };
  auto const are_pending = [&](SpecializedEpilogues const& found) {
    return std::any_of(found.begin(), found.end(), is_pending);
  };
  if (auto const* const steps = std::get_if<LinearSteps>(&plan.steps)) return are_pending(steps->epilogues);
  if (auto const* const steps = std::get_if<TrainingSteps>(&plan.steps)) return are_pending(steps->epilogues);
  if (auto const* const steps = std::get_if<PointwiseSteps>(&plan.steps)) return is_pending(steps->specialization);
  if (auto const* const steps = std::get_if<GradientSteps>(&plan.steps)) return is_pending(steps->specialization);
  auto const* const steps = std::get_if<ReduceSteps>(&plan.steps);
  return steps != nullptr && is_pending(steps->specialization);
}

// Until its epilogue is compiled, a call has it interpreted: but in a capture, which keeps the kernels that it
// captures, the general path waits for it, and where no thread compiles it, it starts one.
bool waits_for_epilogue(CallPlan const& plan) {
  return has_pending_epilogue(plan) && (specialize::is_stalled() || torch_state().is_capturing());
}

// Whether a plan has PyTorch's own functions alone, which see to devices, streams and whoever watches themselves.
bool is_forwarded(CallPlan const& plan) {
  return std::holds_alternative<ProductSteps>(plan.steps) || std::holds_alternative<OperationSteps>(plan.steps);
}

PyObject* forward(CallPlan const& plan, Arguments const& arguments) {
  direct_call_count.fetch_add(1, std::memory_order_relaxed);
  return std::visit(Run(plan, arguments, nullptr), plan.steps).release();
}

PyObject* run_directly(CallPlan const& plan, Arguments const& arguments) {
  TorchState const& torch = torch_state();
  int32_t const device = arguments.facts[0].device_index;
  if (std::holds_alternative<GeneralSteps>(plan.steps) || !torch.is_current_device(device)) Py_RETURN_NONE;
  if (waits_for_epilogue(plan)) Py_RETURN_NONE;
  Stream stream = nullptr;
  if (!torch.current_stream(device, stream)) return nullptr;
  direct_call_count.fetch_add(1, std::memory_order_relaxed);
  return std::visit(Run(plan, arguments, stream), plan.steps).release();
}

// PyTorch's own linear layer; where it refuses, the general path says what is wrong. Other exceptions are those of
// hooks: a checkpoint ends what it computes again by one.
PyObject* run_plainly(Arguments const& arguments) {
  PyRef result = multiply(arguments);
  if (result) {
    direct_call_count.fetch_add(1, std::memory_order_relaxed);
    return result.release();
  }
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_TypeError)) return nullptr;
  PyErr_Clear();
  Py_RETURN_NONE;
}

template <Function function>
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != argument_count(function)) {
    PyErr_Format(PyExc_TypeError, "a direct call takes %zd arguments, got %zd", argument_count(function), count);
    return nullptr;
  }
  if (!torch_state().connected() || pause_count.load(std::memory_order_relaxed) > 0) Py_RETURN_NONE;
  Arguments arguments;
  Reading const reading = read_arguments(function, given, kUnnumbered, arguments);
  if (reading == Reading::kGeneral) Py_RETURN_NONE;
  if (reading == Reading::kPlain) return run_plainly(arguments);
  std::shared_ptr<CallPlan const> plan;
  if (reading == Reading::kKeyed) plan = plan_table().find(arguments.key);
  // What else a call would ask PyTorch for takes long after a backward pass, which leaves the caches cold.
  if (plan != nullptr && is_forwarded(*plan) && !torch_state().is_autocasting()) return forward(*plan, arguments);
  if (!may_run_kernels(function, arguments)) Py_RETURN_NONE;
  if (plan == nullptr) Py_RETURN_NOTIMPLEMENTED;
  return run_directly(*plan, arguments);
}

PyCFunction as_method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  // NOLINTNEXTLINE(bugprone-casting-through-void): Python casts it back, by the flag METH_FASTCALL
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

}  // namespace

std::shared_ptr<CallPlan const> PlanTable::find(CallKey const& key) const {
  [[maybe_unused]] TableLock const lock;
  auto const found = plans_.find(key);
  return found == plans_.end() ? nullptr : found->second;
}

void PlanTable::insert(CallKey const& key, std::shared_ptr<CallPlan const> plan) {
  if (size() >= kLimit) clear();
  [[maybe_unused]] TableLock const lock;
  plans_.insert_or_assign(key, std::move(plan));
}

void PlanTable::clear() {
  decltype(plans_) old;
  [[maybe_unused]] TableLock const lock;
  std::swap(old, plans_);
}

size_t PlanTable::size() const {
  [[maybe_unused]] TableLock const lock;
  return plans_.size();
}

PlanTable& plan_table() {
  static PlanTable* const table = new PlanTable();  // never freed: plans refer to Python's objects
  return *table;
}

PyMethodDef const* call_functions() {
  static PyMethodDef const functions[] = {
      {"call_linear", as_method(&call<Function::kLinear>), METH_FASTCALL,
       "call_linear(x: object, weight: object, bias: object, epilogue: object, operands: object, reduce: object, "
       "keepdim: object, out_dtype: object) -> typing.Any"},
      {"call_pointwise", as_method(&call<Function::kPointwise>), METH_FASTCALL,
       "call_pointwise(fn: object, x: object, operands: object, out_dtype: object) -> typing.Any"},
      {"call_reduce", as_method(&call<Function::kReduce>), METH_FASTCALL,
       "call_reduce(x: object, dim: object, op: object, keepdim: object, prologue: object, operands: object, "
       "out_dtype: object) -> typing.Any"},
      {"call_mlp", as_method(&call<Function::kMlp>), METH_FASTCALL,
       "call_mlp(hidden: object, has_gate: object, recompute: object, x: object, w1: object, b1: object, up: object, "
       "up_bias: object, w2: object, b2: object, residual: object) -> typing.Any"},
      {"call_linear_operator", as_method(&call<Function::kLinearOperator>), METH_FASTCALL,
       "call_linear_operator(x: object, weight: object, bias: object, operands: object, program: int, "
       "reduction: object, out_dtype: object, scheme: int, planes: object) -> typing.Any"},
      {"call_pointwise_operator", as_method(&call<Function::kPointwiseOperator>), METH_FASTCALL,
       "call_pointwise_operator(x: object, operands: object, program: int, out_dtype: object) -> typing.Any"},
      {"call_reduce_operator", as_method(&call<Function::kReduceOperator>), METH_FASTCALL,
       "call_reduce_operator(x: object, operands: object, program: int, reduction: object, dims: object, "
       "out_dtype: object) -> typing.Any"},
      {"call_backward_operator", as_method(&call<Function::kBackwardOperator>), METH_FASTCALL,
       "call_backward_operator(grad: object, x: object, operands: object, program: int, wanted: object, "
       "sums_columns: object) -> typing.Any"},
      {"call_joined_operator", as_method(&call<Function::kJoinedOperator>), METH_FASTCALL,
       "call_joined_operator(x: object, weights: object, biases: object) -> typing.Any"},
      {"training_forward", as_method(&training_forward), METH_FASTCALL,
       "training_forward(plan: object, x: object, weight: object, bias: object, *operands: object) -> typing.Any"},
      {"training_backward", as_method(&training_backward), METH_FASTCALL,
       "training_backward(plan: object, needed: object, grad: object, x: object, weight: object, "
       "*z_and_operands: object) -> typing.Any"},
      {nullptr, nullptr, 0, nullptr}};
  return functions;
}

bool read_key(Function function, PyObject* given, uint64_t callable, CallKey& key) {
  if (!torch_state().connected() || PyTuple_GET_SIZE(given) != argument_count(function)) return false;
  Arguments arguments;
  PyObject* const* const items = &PyTuple_GET_ITEM(given, 0);
  if (read_arguments(function, items, callable, arguments) != Reading::kKeyed) return false;
  if (!may_run_kernels(function, arguments)) return false;
  key = arguments.key;
  return true;
}

bool remember_call(Function function, PyObject* given, uint64_t callable, CallKey const& before, CallPlan plan) {
  CallKey key;
  if (!read_key(function, given, callable, key) || !(key == before)) return false;
  plan_table().insert(key, std::make_shared<CallPlan const>(std::move(plan)));
  return true;
}

PyObject* run_plan(CallPlan const& plan, PyObject* const* tensors, int count, int first_operand, int32_t device) {
  Arguments arguments;
  arguments.first_operand = first_operand;
  arguments.has_bias = first_operand == 3;  // a layer's, behind x and weight
  for (; arguments.tensor_count < count; ++arguments.tensor_count) {
    int const k = arguments.tensor_count;
    arguments.tensors[k] = tensors[k];
    if (!torch_state().read_address(tensors[k], arguments.facts[k].data)) return nullptr;
  }
  Stream stream = nullptr;
  if (!torch_state().current_stream(device, stream)) return nullptr;
  return std::visit(Run(plan, arguments, stream), plan.steps).release();
}

uint64_t direct_calls() { return direct_call_count.load(std::memory_order_relaxed); }

void pause_calls(bool paused) { pause_count.fetch_add(paused ? 1 : -1); }

}  // namespace cutfuse::call
