"""Gradients of the operators. Entered only where one is needed: an autograd.Function costs 6 us of host time a call.

Forwards keep the pre-activation, as PyTorch's own linear layer followed by an activation would. Backwards take one
kernel for everything that is element by element, with the bias gradient's column sum, and cuBLAS for the products but
where `cutfuse.precision` forces fp32 ones to run otherwise.
Where a gradient is to be differentiated again, or is batched, it is that of the composed operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dynamo
from ..epilogue import Program
from ..precision import SPLIT_MODES, allows_tf32, captured_mode, process, product_mode
from . import composed, schema
from .fake import sum_dtype
from .prepared import UNPREPARED, Prepared

# A gradient through these needs the reduced values themselves; through a sum it does not.
_NEEDS_RESULT = ("amax", "amin", "logsumexp")


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def composes_gradient(grad: Tensor) -> bool:
    """Whether a backward's gradients are those of the composed operations.

    They are where it runs with create_graph=True, and where `grad` is batched (is_grads_batched=True, vmap over a
    backward pass), which the operators are not made for.
    """
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return torch.is_grad_enabled() or functorch.is_legacy_batchedtensor(grad) or functorch.is_batchedtensor(grad)


def differentiate(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """PyTorch's own gradients of `function`, differentiable again where the backward pass asks for that."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [t if t is None else t.view_as(t) for t in inputs]  # one tensor may be two inputs
        y = function(*aliases)
    wanted = [t for t, needed in zip(aliases, needs, strict=True) if needed and t is not None]
    if not y.requires_grad:  # of comparisons only
        return [None] * len(needs)
    found = torch.autograd.grad(y, wanted, grad, create_graph=again, allow_unused=True)
    gradients = iter(found)
    return [next(gradients) if needed else None for needed in needs]


@dynamo.assume_constant_result
def _inputs_with_gradient(program: str) -> tuple[int, ...]:
    return tuple(Program.parse(program).inputs_with_gradient)


def _wanted(needs: Sequence[bool], program: str) -> list[int]:
    """Which gradients to compute: 0 for x, k for operand k - 1. What the result does not read has none."""
    reached = _inputs_with_gradient(program)
    return [k for k, needed in enumerate(needs) if needed and k in reached]


def _element_gradients(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    result: Tensor | None,
    wanted: list[int],
    column_sum: bool = False,
) -> tuple[dict[int, Tensor], Tensor | None]:
    """Gradients by index (0 for x, k for operand k - 1), and x's gradient summed over all but the last dimension."""
    if not wanted:
        return {}, None
    if reduction in _NEEDS_RESULT:
        outputs = schema.pointwise_backward(grad, x, operands, program, reduction, result, wanted, column_sum)
    else:
        outputs = schema.pointwise_backward(grad, x, operands, program, "none", None, wanted, column_sum)
    # Dynamo of PyTorch 2.8 refuses lists of different lengths, whatever strict is.
    return dict(zip(wanted, outputs[: len(wanted)], strict=True)), outputs[-1] if column_sum else None


class Pointwise(torch.autograd.Function):
    """`program(x, operands)`."""

    @staticmethod
    def forward(ctx: Any, program: str, out_dtype: torch.dtype, x: Tensor, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(x, *operands)
        ctx.program = program
        return schema.pointwise(x, operands, program, out_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *operands = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if composes_gradient(grad):
            program = Program.parse(ctx.program)
            again = differentiate(
                lambda x, *operands: composed.pointwise(x, operands, program, grad.dtype), (x, *operands), needs, grad
            )
            return (None, None, *again)
        gradients, _ = _element_gradients(grad, x, operands, ctx.program, "none", None, _wanted(needs, ctx.program))
        return (None, None, *(gradients.get(k) for k in range(len(needs))))


class Reduce(torch.autograd.Function):
    """`reduction(program(x, operands))` over `dims`."""

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        reduction: str,
        dims: tuple[int, ...],
        out_dtype: torch.dtype,
        x: Tensor,
        *operands: Tensor,
    ) -> Tensor:
        ctx.program = program
        ctx.reduction = reduction
        ctx.dims = dims
        if reduction not in _NEEDS_RESULT:
            ctx.save_for_backward(None, x, *operands)
            return schema.reduce(x, operands, program, reduction, dims, out_dtype)
        result = schema.reduce(x, operands, program, reduction, dims, sum_dtype(x.dtype))
        ctx.save_for_backward(result, x, *operands)
        return result.to(out_dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result, x, *operands = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        if composes_gradient(grad):
            program = Program.parse(ctx.program)
            again = differentiate(
                lambda x, *operands: composed.reduce(x, operands, program, ctx.reduction, ctx.dims, grad.dtype),
                (x, *operands),
                needs,
                grad,
            )
            return (None, None, None, None, *again)
        reduced = [1 if d in ctx.dims else size for d, size in enumerate(x.shape)]
        count = 1
        for d in ctx.dims:
            count *= x.shape[d]
        gradients, _ = _element_gradients(
            _spread(grad.reshape(reduced), ctx.reduction, count),
            x,
            operands,
            ctx.program,
            ctx.reduction,
            None if result is None else result.reshape(reduced),
            _wanted(needs, ctx.program),
        )
        return (None, None, None, None, *(gradients.get(k) for k in range(len(needs))))


class Linear(torch.autograd.Function):
    """`program(x @ weight.T + bias, operands)`, its rows reduced where `reduction` is not "none"."""

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        reduction: str,
        out_dtype: torch.dtype,
        snapshot: Tensor | None,
        planes: Tensor | None,
        plan: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        ctx.program = program
        ctx.reduction = reduction
        ctx.mode = captured_mode()
        z = _pre_activation(x, weight, bias, Prepared(snapshot, planes, plan))
        saved: Tensor | None = z
        result = None
        if program == schema.IDENTITY and reduction == "none" and out_dtype == z.dtype:
            y, saved = z, None
        elif reduction == "none":
            y = schema.pointwise(z, operands, program, out_dtype)
        else:
            kept = sum_dtype(z.dtype) if reduction in _NEEDS_RESULT else out_dtype
            y = schema.reduce(z, operands, program, reduction, (1,), kept)
            if reduction in _NEEDS_RESULT:
                result = y.unsqueeze(1)
                y = y.to(out_dtype, copy=True)
        ctx.save_for_backward(result, x, weight, bias, saved, *operands)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result, x, weight, bias, z, *operands = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *needs = ctx.needs_input_grad[6:]
        if composes_gradient(grad):
            again = differentiate(
                lambda x, weight, bias, *operands: _composed_linear(x, weight, bias, operands, ctx, grad.dtype),
                (x, weight, bias, *operands),
                ctx.needs_input_grad[6:],
                grad,
            )
            return (*[None] * 6, *again)
        if ctx.reduction != "none":
            grad = _spread(grad.unsqueeze(1), ctx.reduction, z.shape[1])
        if z is None:
            gradients = {0: grad}
            column_sum = (
                schema.reduce(grad, [], schema.IDENTITY, "sum", (0,), sum_dtype(grad.dtype)) if needs_bias else None
            )
        else:
            wanted = _wanted([needs_x or needs_weight or needs_bias, *needs], ctx.program)
            gradients, column_sum = _element_gradients(
                grad, z, operands, ctx.program, ctx.reduction, result, wanted, needs_bias and 0 in wanted
            )
        grad_z = gradients.get(0)  # None where the result does not come from z
        return (
            *[None] * 6,
            _product(grad_z, weight.t(), ctx.mode) if needs_x and grad_z is not None else None,
            _product(grad_z.t(), x.t(), ctx.mode) if needs_weight and grad_z is not None else None,
            None if column_sum is None else column_sum.to(bias.dtype),
            *(gradients.get(k + 1) for k in range(len(needs))),
        )


def is_forced(x: Tensor, mode: str = "") -> bool:
    """Whether products of x run in another way than PyTorch runs them: in a captured mode, or the one of now.

    A compiled function may run in any mode once one was asked for: its operators read it when they run.
    """
    if x.dtype != torch.float32 or x.device.type != "cuda":
        return False
    if torch.compiler.is_compiling():
        return process.opted_in
    mode = product_mode(mode)
    return mode in SPLIT_MODES or (mode == "tf32") != allows_tf32()


def _pre_activation(x: Tensor, weight: Tensor, bias: Tensor | None, prepared: Prepared) -> Tensor:
    if is_forced(x):
        return schema.linear(x, weight, bias, [], schema.IDENTITY, x.dtype, *prepared)
    return F.linear(x, weight, bias)


def _product(a: Tensor, b: Tensor, mode: str) -> Tensor:
    """`a @ b.T`."""
    return schema.product(a, b, mode) if is_forced(a, mode) else torch.mm(a, b.t())


def _composed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor], ctx: Any, out_dtype: torch.dtype
) -> Tensor:
    program = Program.parse(ctx.program)
    if ctx.reduction == "none":
        return composed.linear(x, weight, bias, operands, program, out_dtype)
    return composed.linear_reduce(x, weight, bias, operands, program, ctx.reduction, out_dtype)


def _spread(grad: Tensor, reduction: str, count: int) -> Tensor:
    """The gradient that reaches each element of a row, before the reduction's own weight."""
    return grad.to(sum_dtype(grad.dtype)) / count if reduction == "mean" else grad


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    prepared: Prepared = UNPREPARED,
) -> Tensor:
    """The operator, or with `reduction` the one that reduces rows, and its gradient where one is needed."""
    if needs_gradient(x, weight, bias, *operands):
        y: Tensor = Linear.apply(program, reduction, out_dtype, *prepared, x, weight, bias, *operands)
        return y
    if reduction == "none":
        return schema.linear(x, weight, bias, operands, program, out_dtype, *prepared)
    return schema.linear_reduce(x, weight, bias, operands, program, reduction, out_dtype, *prepared)


def pointwise(x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype) -> Tensor:
    if needs_gradient(x, *operands):
        y: Tensor = Pointwise.apply(program, out_dtype, x, *operands)
        return y
    return schema.pointwise(x, operands, program, out_dtype)


def reduce(
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    dims: tuple[int, ...],
    out_dtype: torch.dtype,
) -> Tensor:
    if needs_gradient(x, *operands):
        y: Tensor = Reduce.apply(program, reduction, dims, out_dtype, x, *operands)
        return y
    return schema.reduce(x, operands, program, reduction, dims, out_dtype)
