#include "call/training.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "call/arguments.h"
#include "call/calls.h"
#include "call/memory.h"
#include "launch/launcher.h"

namespace cutfuse::call {

namespace {

constexpr char const* kCapsule = "cutfuse.TrainingPlan";

TrainingPlan const* plan_of(PyObject* handle) {
  return static_cast<TrainingPlan const*>(PyCapsule_GetPointer(handle, kCapsule));
}

// Unless something was wrong already.
PyObject* refuse(PyObject* type, char const* message) {
  if (!PyErr_Occurred()) PyErr_SetString(type, message);
  return nullptr;
}

bool same_layout(TensorFacts const& facts, TensorFacts const& expected) {
  return facts.dtype == expected.dtype && facts.device_type == expected.device_type &&
         facts.device_index == expected.device_index && facts.ndim == expected.ndim &&
         std::equal(facts.sizes, facts.sizes + facts.ndim, expected.sizes) &&
         std::equal(facts.strides, facts.strides + facts.ndim, expected.strides);
}

bool read(PyObject* tensor, TensorFacts& facts) {
  return torch_state().is_plain_tensor(tensor) && torch_state().read(tensor, facts);
}

// False where a tensor is not as planned.
bool read_as(TensorFacts const& expected, PyObject* given, void const*& data) {
  TensorFacts facts;
  if (!read(given, facts) || !same_layout(facts, expected)) return false;
  data = facts.data;
  return true;
}

// What a backward pass is given: z, and the operands that it reads.
bool read_kept(TrainingPlan const& plan, PyObject* const* given, Py_ssize_t count, PointwiseBackwardProblem& problem) {
  size_t const operands = plan.is_read.size();
  if (count != static_cast<Py_ssize_t>(operands) + 1 || !read_as(plan.z, given[0], problem.x.data)) return false;
  for (size_t k = 0; k < operands; ++k) {
    void const*& data = problem.operands.items[k].data;
    data = problem.x.data;
    if (plan.is_read[k] && !read_as(plan.operand_facts[k], given[k + 1], data)) return false;
  }
  return true;
}

bool is_aligned(void const* data) { return reinterpret_cast<uintptr_t>(data) % kOperandAlignment == 0; }

// The gradient of y as a matrix, in the place of a contiguous one. False where it is not one in memory.
bool read_gradient(TrainingPlan const& plan, PyObject* given, Operand& grad) {
  TorchState const& torch = torch_state();
  TensorFacts facts;
  if (!torch.is_plain_tensor(given) || !torch.read(given, facts) || torch.is_negated(given)) return false;
  bool const same_sizes = facts.ndim == plan.z.ndim && std::equal(facts.sizes, facts.sizes + facts.ndim, plan.z.sizes);
  if (!same_sizes || facts.dtype != word_of(grad.dtype) || facts.device_index != plan.z.device_index) return false;
  if (facts.device_type != plan.z.device_type) return false;
  grad.data = facts.data;
  if (facts.ndim != 2) return std::equal(facts.strides, facts.strides + facts.ndim, plan.z.strides);
  grad.strides[1] = facts.strides[0];
  grad.strides[2] = facts.strides[1];
  return true;
}

// Whether kernels that multiply can read the gradient of y in place of z's.
bool is_whole(TrainingPlan const& plan, Operand const& grad) {
  return grad.strides[1] == plan.gradients.problem.extents.columns && grad.strides[2] == 1 && is_aligned(grad.data);
}

bool current_stream(TrainingPlan const& plan, Stream& stream) {
  return torch_state().current_stream(plan.z.device_index, stream);
}

bool allocate_gradients(TrainingPlan const& plan, ElementGradients& gradients) {
  if (!plan.hands_gradient_on) return allocate_gradients(plan.gradients, nullptr, gradients);
  return !plan.gradients.column_sum || allocate_sum(plan.gradients.column_sum->sum, gradients.column_sum);
}

// A product of a backward pass: what z's gradient is multiplied by, and where the result lies.
struct ProductRun {
  BackwardProduct const* product = nullptr;  // null where PyTorch multiplies, or the gradient is not wanted
  void const* factor = nullptr;
  Memory result;
};

// False where the factor is not as planned.
bool read_factor(std::optional<BackwardProduct> const& product, bool needed, PyObject* factor, ProductRun& run) {
  if (!product || !needed) return true;
  TensorFacts facts;
  LinearRequest const& request = product->steps.plan.request;
  bool const needs_alignment = product->factor_first ? request.x.aligned : request.weight.aligned;
  if (!read(factor, facts) || !same_layout(facts, product->factor)) return false;
  if (needs_alignment && !is_aligned(facts.data)) return false;
  run.product = &*product;
  run.factor = facts.data;
  return true;
}

bool allocate_result(ProductRun& run) {
  if (run.product == nullptr) return true;
  run.result = allocate(run.product->result);
  return static_cast<bool>(run.result.tensor);
}

void launch_product(TrainingPlan const& plan, ProductRun const& run, void const* grad_z, Memory const& workspace,
                    Stream stream) {
  if (run.product == nullptr) return;
  bool const factor_first = run.product->factor_first;
  LinearBuffers buffers = {};
  buffers.x = factor_first ? run.factor : grad_z;
  buffers.weight = factor_first ? grad_z : run.factor;
  buffers.result = run.result.address;
  buffers.workspace = workspace.address;
  LinearSteps const& steps = run.product->steps;
  launch_fused(steps.plan, buffers, plan.identity, {}, steps.epilogues, stream);
}

PyObject* tuple_of(TrainingPlan const& plan, PyObject* grad, ElementGradients& gradients, ProductRun& grad_x,
                   ProductRun& grad_weight) {
  constexpr Py_ssize_t kFirstOperand = 4;
  auto const count = static_cast<Py_ssize_t>(plan.is_read.size()) + kFirstOperand;
  PyRef tuple = PyRef::steal(PyTuple_New(count));
  if (!tuple) return nullptr;
  for (Py_ssize_t k = 0; k < count; ++k) PyTuple_SET_ITEM(tuple.get(), k, Py_NewRef(Py_None));
  auto const put = [&](Py_ssize_t place, PyRef gradient) {
    Py_DECREF(Py_None);
    PyTuple_SET_ITEM(tuple.get(), place, gradient.release());
  };
  for (size_t k = 0; k < plan.gradients.outputs.size(); ++k) {
    int const wrt = plan.gradients.problem.derivatives[k].wrt;
    put(wrt == 0 ? 0 : kFirstOperand + wrt - 1,
        plan.hands_gradient_on ? PyRef::share(grad) : take_gradient(gradients, k));
  }
  if (grad_x.product != nullptr) put(1, std::move(grad_x.result.tensor));
  if (grad_weight.product != nullptr) put(2, std::move(grad_weight.result.tensor));
  if (plan.gradients.column_sum) put(3, std::move(gradients.column_sum.result.tensor));
  return tuple.release();
}

}  // namespace

PyObject* wrap(TrainingPlan plan) {
  auto owned = std::make_unique<TrainingPlan>(std::move(plan));
  PyObject* const capsule = PyCapsule_New(owned.get(), kCapsule, [](PyObject* handle) {
    delete static_cast<TrainingPlan*>(PyCapsule_GetPointer(handle, kCapsule));
  });
  if (capsule != nullptr) owned.release();  // NOLINT(bugprone-unused-return-value): the capsule owns it now
  return capsule;
}

PyObject* training_forward(PyObject*, PyObject* const* given, Py_ssize_t count) {
  constexpr Py_ssize_t kBias = 3;
  TrainingPlan const* const plan = count > kBias && count <= Arguments::kMaxTensors ? plan_of(given[0]) : nullptr;
  if (plan == nullptr) return refuse(PyExc_TypeError, "training_forward(plan, x, weight, bias or None, *operands)");
  PyObject* tensors[Arguments::kMaxTensors];
  int tensor_count = 0;
  for (Py_ssize_t k = 1; k < count; ++k) {
    if (given[k] != Py_None) tensors[tensor_count++] = given[k];
  }
  int const first_operand = given[kBias] == Py_None ? 2 : 3;
  return run_plan(plan->forward, tensors, tensor_count, first_operand, plan->z.device_index);
}

PyObject* training_backward(PyObject*, PyObject* const* given, Py_ssize_t count) {
  constexpr Py_ssize_t kFirstElement = 5;  // z
  TrainingPlan const* const plan = count >= kFirstElement ? plan_of(given[0]) : nullptr;
  bool const has_elements = count > kFirstElement;
  if (plan == nullptr || has_elements == plan->hands_gradient_on || !PyTuple_Check(given[1]) ||
      PyTuple_GET_SIZE(given[1]) < 3) {
    return refuse(PyExc_TypeError,
                  "training_backward(plan, needed, grad, x, weight, z, *operands), without z and operands where the "
                  "gradient is handed on");
  }
  auto const is_needed = [&](Py_ssize_t place) { return PyTuple_GET_ITEM(given[1], place) == Py_True; };
  TorchState const& torch = torch_state();
  bool const is_handed_on = plan->hands_gradient_on;
  PointwiseBackwardProblem problem = plan->gradients.problem;
  Operand& grad = problem.grad;
  ProductRun grad_x;
  ProductRun grad_weight;
  if (torch.records_gradients() || torch.is_watched() || !torch.is_current_device(plan->z.device_index) ||
      !read_gradient(*plan, given[2], grad) || (is_handed_on && !is_whole(*plan, grad)) ||
      (!is_handed_on && !read_kept(*plan, given + kFirstElement, count - kFirstElement, problem)) ||
      !read_factor(plan->grad_x, is_needed(1), given[4], grad_x) ||
      !read_factor(plan->grad_weight, is_needed(2), given[3], grad_weight)) {
    Py_RETURN_NONE;
  }
  ElementGradients gradients;
  Stream stream = nullptr;
  if (!allocate_gradients(*plan, gradients) || !allocate_result(grad_x) || !allocate_result(grad_weight) ||
      !current_stream(*plan, stream)) {
    return nullptr;
  }
  Memory workspace;
  if (plan->backward_workspace_sizes && (grad_x.product != nullptr || grad_weight.product != nullptr)) {
    workspace = allocate_bytes(plan->backward_workspace_sizes);
    if (!workspace.tensor) return nullptr;
  }
  void const* const grad_z = is_handed_on ? grad.data : gradients.outputs[0].address;
  bool const done = launch([&] {
    std::optional<ColumnSum> const& columns = plan->gradients.column_sum;
    if (!is_handed_on) launch_gradients(plan->gradients, problem, gradients, stream);
    if (is_handed_on && columns) launch_sum(columns->sum, grad.data, gradients.column_sum, stream);
    launch_product(*plan, grad_x, grad_z, workspace, stream);
    launch_product(*plan, grad_weight, grad_z, workspace, stream);
  });
  return done ? tuple_of(*plan, given[2], gradients, grad_x, grad_weight) : nullptr;
}

}  // namespace cutfuse::call
