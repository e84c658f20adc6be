"""The direct path of a linear layer in training.

The forward and the backward pass each call csrc/call once. What that does not support, such as a backward pass that is
to be differentiated again, takes the general path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..precision import allows_tf32, captured_mode
from .autograd import (
    OperandFacts,
    is_forced,
    kept_of,
    linear_gradients,
    operand_facts,
    restored,
    sum_gradients,
    weight_gradient,
)
from .call_plans import (
    Planned,
    as_given,
    column_sum,
    contiguous_result,
    general,
    gradient_outputs,
    plan_linear_call,
)
from .layouts import dtype_codes
from .linear_plan import changes_setting, cublas_linear, matrices_of
from .planner import LinearArguments
from .specialize import Epilogues, find_alone
from .training_step import (
    IDENTITY,
    BackwardProducts,
    hands_gradient_on,
    issuer_of_products,
    needs_planes,
    plan_backward_products,
    storing,
)


class TrainedCall(NamedTuple):
    """What forward and backward passes of layers with the same key need, on the direct and on the general path."""

    handle: Any  # the native plan
    program: str
    mode: str  # the precision of fp32 products; empty for other types
    tf32: bool  # whether PyTorch's setting allowed tf32 in the forward pass
    multiply: Callable[[Tensor, Tensor], Tensor] | None  # as of weight_gradient, in that precision
    hands_gradient_on: bool  # whether z's gradient and those of the operands are the gradient that arrives
    operands: tuple[OperandFacts, ...]
    reduction: str = "none"


class DirectLinear(torch.autograd.Function):
    """`program(x @ weight.T + bias, operands)`, with x `[..., K]`."""

    @staticmethod
    def forward(
        ctx: Any, plan: TrainedCall, x: Tensor, weight: Tensor, bias: Tensor | None, *operands: Tensor
    ) -> Tensor:
        y: Tensor
        found = native.core.training_forward(plan.handle, x, weight, bias, *operands)
        if plan.hands_gradient_on:
            y = found
            ctx.save_for_backward(x, weight)
        else:
            y, z = found
            ctx.save_for_backward(x, weight, bias, z, *kept_of(plan.operands, operands))
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        x, weight, *rest = ctx.saved_tensors
        bias, *elements = rest or [None]
        needed = ctx.needs_input_grad
        found = None
        if not plan.mode or plan.tf32 == allows_tf32():
            found = native.core.training_backward(plan.handle, needed, grad, x, weight, *elements)
        if found is None:
            return _general_backward(plan, grad, x, weight, bias, elements, needed)
        grad_z, grad_x, grad_weight, grad_bias, *grads = found
        multiplies_x = needed[1] and grad_x is None
        multiplies_weight = needed[2] and grad_weight is None
        if multiplies_x or multiplies_weight:
            rows = grad_z if x.dim() == 2 else grad_z.view(-1, grad_z.shape[-1])
            if multiplies_x:
                grad_x = (plan.multiply or torch.mm)(rows, weight)
                grad_x = grad_x if x.dim() == 2 else grad_x.view(x.shape)
            if multiplies_weight:
                matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
                grad_weight = weight_gradient(rows, matrix, weight, plan.multiply)
        return None, grad_x, grad_weight, grad_bias, *grads


# Calls the C++ apply directly: Function.apply's checks were made already.
apply = super(torch.autograd.Function, DirectLinear).apply


def _general_backward(
    plan: TrainedCall,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    elements: Sequence[Any],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients on the general path. elements: z and what was kept of the operands, or nothing where the gradient
    is handed on."""
    if plan.hands_gradient_on:
        of_product = sum_gradients(_as_matrix(grad), _as_matrix(x), weight, plan.mode, needed[1:4])
        of_x = None if of_product[0] is None else of_product[0].reshape(x.shape)
        return (None, of_x, *of_product[1:], *(grad if is_needed else None for is_needed in needed[4:]))
    z, *kept = elements
    operands = restored(plan.operands, kept, z.device, needed[4:])
    matrices = [_as_matrix(operand) for operand in operands]
    found = linear_gradients(
        plan, _as_matrix(grad), None, _as_matrix(x), weight, bias, _as_matrix(z), matrices, tuple(needed[1:])
    )
    given = (x, weight, bias, *operands)
    shaped = [None if g is None or t is None else g.reshape(t.shape) for g, t in zip(found, given, strict=True)]
    return (None, *shaped)


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)


def plan_training_call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    arguments: LinearArguments,
    shape: Sequence[int],
) -> Planned:
    """The plan of a call with these tensors. arguments: those of its operator. shape: of the result."""
    core = native.core
    if any(t.numel() != matrix.numel() for t, matrix in zip(operands, arguments.operands, strict=True)):
        return general()  # of an operand that is broadcast already; its gradient is smaller than the matrix
    is_identity = len(arguments.program.instructions) == 0 and arguments.out_dtype == x.dtype
    wanted = [k + 1 for k, operand in enumerate(operands) if operand.requires_grad]
    reached = arguments.program.inputs_with_gradient
    if 0 not in reached or any(k not in reached for k in wanted):
        return general()
    z = torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
    m, n, codes, out_dtype = math.prod(z.shape[:-1]), z.shape[-1], dtype_codes(), arguments.out_dtype
    mode = captured_mode() if x.dtype == torch.float32 else ""
    issuer = issuer_of_products(m, weight, mode)
    products = plan_backward_products(arguments.x, weight, issuer, mode)
    dense = contiguous_result((m, n), torch.float32)
    shapes = [(m, n), *[arguments.operands[k - 1].shape for k in wanted]]
    gradients = [contiguous_result(t.shape, t.dtype) for t in (z, *[operands[k - 1] for k in wanted])]
    outputs = gradient_outputs(dense, [0, *wanted], shapes, gradients, x.device)
    program, has_sum = arguments.program, bias is not None and bias.requires_grad
    is_handed_on = is_identity or hands_gradient_on(arguments)
    # What is handed on has the result's shape; the general path hands a matrix on, which autograd gives the operand's.
    if is_handed_on and any(operands[k - 1].shape != z.shape for k in wanted):
        return general()
    asked = arguments if is_handed_on else storing(arguments, issuer)
    forward = plan_linear_call(asked, shape=shape, is_bias_apart=adds_bias_apart(x, bias))
    grad, of_z = (0, codes[out_dtype], 0, n, 1), (0, codes[z.dtype], 0, n, 1)
    derivatives, given = as_given(outputs)
    is_read = [k in program.operands_in_derivatives for k in range(len(operands))]
    first_of_z = (0, codes[z.dtype], 0, 0, 0)  # in the place of what no derivative reads
    kept = [own if reads else first_of_z for own, reads in zip(matrices_of(arguments), is_read, strict=True)]
    problem = core.PointwiseBackwardProblem(
        program.native, (1, m, n), grad, of_z, kept, derivatives, has_sum and not is_handed_on
    )
    backward: Epilogues = [] if is_handed_on else find_alone(problem, x.device.index or 0)
    found = [*forward.epilogues, *backward]
    sums = None
    if bias is not None and bias.requires_grad:
        rows = m if is_handed_on else core.pointwise_backward_row_blocks(m, n)
        summed = bias.dtype if is_handed_on else torch.float32
        sums = column_sum(rows, n, summed, ((n,), (1,), bias.dtype), bias.device)
    handle = core.training_plan(
        forward.call,
        z,
        list(operands),
        problem,
        is_read,
        given,
        sums,
        backward[0] if backward else None,
        IDENTITY.native,
        None if products.of_x is None else (products.of_x, weight, False, contiguous_result(x.shape, x.dtype)),
        None if products.of_weight is None else _weight_product(products, x, weight),
        is_handed_on,
    )
    multiply = functools.partial(_multiply, mode) if changes_setting(x, mode) else None
    training = TrainedCall(
        handle, program.text, mode, allows_tf32(), multiply, is_handed_on, operand_facts(program, operands)
    )
    return Planned(core.training_call(apply, training, found), found)


def _multiply(mode: str, a: Tensor, b: Tensor) -> Tensor:
    return cublas_linear(a, b.t(), None, mode)


def adds_bias_apart(x: Tensor, bias: Tensor | None) -> bool:
    """Whether PyTorch rounds the product of x `[..., K]` before it adds the bias, which it does not of a matrix."""
    return bias is not None and x.dim() > 2 and not x.is_contiguous()


def multiplies_at_once(arguments: LinearArguments) -> bool:
    """Whether each of a training step's products is one kernel, of ours or of cuBLAS in PyTorch's own setting."""
    x = arguments.x
    if x.dtype != torch.float32:
        return True
    return not changes_setting(x) and not (is_forced(x) and needs_planes(arguments))


def _weight_product(products: BackwardProducts, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """The product that is the weight's gradient, as the native module takes it: the plan, x, whether x comes first in
    it, and the result."""
    result = contiguous_result(weight.shape, weight.dtype)
    if products.is_weight_turned:
        n, k = weight.shape
        result = (n, k), (1, n), weight.dtype
    return products.of_weight, x, products.is_weight_turned, result
