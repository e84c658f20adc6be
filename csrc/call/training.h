// The kernels of a linear layer that is trained: y = program(z, operands), and its gradients.
#pragma once

#include <Python.h>

#include <optional>
#include <vector>

#include "call/call_plan.h"
#include "call/memory.h"
#include "call/torch_state.h"

namespace cutfuse::call {

// A product of the backward pass by kernels of ours, of z's gradient and x or the weight.
struct BackwardProduct {
  LinearSteps steps;
  TensorFacts factor;  // what x or the weight has to be, but for its address
  bool factor_first;   // it is the planner's x, and z's gradient the weight
  ResultLayout result;
};

struct TrainingPlan {
  CallPlan forward;  // gives (y, z), or y alone where the gradient is handed on
  TensorFacts z;     // what the tensors have to be, but for their addresses
  std::vector<TensorFacts> operand_facts;
  std::vector<bool> is_read;  // which of the operands the backward pass reads, and is given
  GradientSteps gradients;    // z's first, and the sum of its rows; z's first element stands for what is not read
  bool hands_gradient_on;     // all of them are the gradient that arrives, whose own rows are summed; needs no z
  Program identity;           // of the backward products
  std::optional<BackwardProduct> grad_x;       // z's gradient @ weight; empty where PyTorch multiplies
  std::optional<BackwardProduct> grad_weight;  // z's gradient, transposed, @ x; likewise
  PyRef backward_workspace_sizes;  // which the two use after each other: a tuple of one integer; null for none
};

// A handle for the functions below; null with an exception where it cannot be made.
PyObject* wrap(TrainingPlan plan);

// training_forward(plan, x, weight, bias or None, *operands), as the plan was made for: (y, z), or y alone where the
// gradient is handed on.
PyObject* training_forward(PyObject*, PyObject* const* given, Py_ssize_t count);

// training_backward(plan, needed, grad, x, weight, z, *operands): a tuple of the gradients of z, x and the weight, the
// column sum of z's, and each operand's gradient; None for those that are not wanted, and for x's and the weight's
// where PyTorch is to multiply. z and the operands are not given where the gradient is handed on; anything stands for
// an operand that is not read. needed: what autograd wants, as of (plan, x, weight, ...). None alone where the general
// path has to run: gradients are recorded again, a mode or a transform is active, or a tensor is not laid out as it
// was.
PyObject* training_backward(PyObject*, PyObject* const* given, Py_ssize_t count);

}  // namespace cutfuse::call
