"""Gradients of linear layers. Used only where a gradient is needed, as an autograd.Function costs 6 us of host time.

The forward pass keeps the pre-activation, as PyTorch's linear layer followed by an activation does; a fused kernel
stores it beside the result. In the backward pass, one kernel computes all elementwise gradients and the column sum for
the bias. In fp32 at PyTorch's "highest" (mode "guarded"), the products are split products where the planner expects
those to be faster than cuBLAS; cuBLAS computes tf32 products and those of large 16-bit layers, kernels of ours those of
small ones (planning/training_step.py). `cutfuse.precision` forces another mode. Gradients that are batched, or that are
to be differentiated again, are those of PyTorch's own operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import composed
from ..epilogue import Program
from ..epilogue.table import NEEDS_RESULT
from ..native import stands_in_for
from ..ops import inductor, schema
from ..planning.fused import cublas_linear
from ..planning.linear_plan import LinearArguments
from ..planning.prepared import UNPREPARED, Prepared
from ..planning.training_step import hands_gradient_on, is_traced, issuer_of_products
from ..precision import SPLIT_MODES, allows_tf32, captured_mode, process, product_mode
from .elementwise import (
    composes_gradient,
    differentiate,
    element_gradients,
    facts_in_backward,
    kept_dtype,
    kept_of,
    needs_gradient,
    restored,
    spread,
    wanted_inputs,
)
from .products import weight_gradient


class Linear(torch.autograd.Function):
    """`program(x @ weight.T + bias, operands)`, its rows reduced where `reduction` is not "none".

    recompute: no pre-activation is kept, and the backward pass multiplies x by weight again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        reduction: str,
        out_dtype: torch.dtype,
        recompute: bool,
        snapshot: Tensor | None,
        planes: Tensor | None,
        scheme: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        ctx.program = program
        ctx.reduction = reduction
        ctx.recompute = recompute
        ctx.mode = captured_mode()
        prepared = Prepared(snapshot, planes, scheme)
        z: Tensor | None
        result = z = None
        if recompute:  # no gradient is recorded in here
            y = linear(x, weight, bias, operands, program, reduction, out_dtype, prepared)
        elif program != schema.IDENTITY and reduction == "none" and not torch.compiler.is_compiling():
            y, z = schema.linear_with_pre_activation(x, weight, bias, operands, program, out_dtype, *prepared)
        else:
            y, z, result = _product_and_pass(x, weight, bias, operands, program, reduction, out_dtype, prepared)
        ctx.operands = facts_in_backward(program, reduction, operands)
        ctx.save_for_backward(result, x, weight, bias, z, *kept_of(ctx.operands, operands))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result, x, weight, bias, z, *kept = ctx.saved_tensors
        operands = restored(ctx.operands, kept, x.device, ctx.needs_input_grad[10:])
        if ctx.recompute and not composes_gradient(grad):
            z = _pre_activation_again(x, weight, bias, ctx.mode)
            if ctx.reduction in NEEDS_RESULT:  # of this z, whose values the gradient compares with it
                result_dtype = kept_dtype(z, operands)
                result = schema.reduce(z, operands, ctx.program, ctx.reduction, (1,), result_dtype).unsqueeze(1)
        found = linear_gradients(ctx, grad, result, x, weight, bias, z, operands, ctx.needs_input_grad[7:])
        return (*[None] * 7, *found)


class LinearSum(torch.autograd.Function):
    """`x @ weight.T + bias` plus an operand or a number: the backward pass needs nothing of what is added."""

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        snapshot: Tensor | None,
        planes: Tensor | None,
        scheme: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mode = captured_mode()
        return schema.linear(x, weight, bias, operands, program, x.dtype, snapshot, planes, scheme)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        of_product = sum_gradients(grad, x, weight, ctx.mode, needed[:3])
        return (*[None] * 4, *of_product, *(grad if is_needed else None for is_needed in needed[3:]))


def sum_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mode: str, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, of which those are `needed`, where `grad` is that of the pre-activation.

    mode: what the forward pass multiplied fp32 matrices in.
    """
    needs_x, needs_weight, needs_bias = needed
    if composes_gradient(grad):
        of_x, of_weight = differentiate(F.linear, (x, weight), (needs_x, needs_weight), grad)
        return of_x, of_weight, grad.sum(0) if needs_bias else None
    of_x, of_weight = _product_gradients(grad, x, weight, mode, needs_x, needs_weight)
    return of_x, of_weight, _sum_of_rows(grad, grad.dtype) if needs_bias else None


def linear_gradients(
    forward: Any,
    grad: Tensor,
    result: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    operands: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and the operands. `forward` has the forward pass's program, reduction and mode.

    result: the reduction's result, if its gradient needs that. z: the pre-activation; None if y is the pre-activation.
    """
    if composes_gradient(grad):
        function = _composed_linear(forward, grad.dtype)
        return tuple(differentiate(function, (x, weight, bias, *operands), needed, grad))
    needs_x, needs_weight, needs_bias, *needs = needed
    if forward.reduction != "none" and z is not None:
        grad = spread(grad.unsqueeze(1), forward.reduction, z.shape[1])
    if z is None:
        gradients = {0: grad}
        column_sum = _sum_of_rows(grad, x.dtype) if needs_bias else None
    else:
        wanted = wanted_inputs([needs_x or needs_weight or needs_bias, *needs], forward.program)
        gradients, column_sum = element_gradients(
            grad, z, operands, forward.program, forward.reduction, result, wanted, needs_bias and 0 in wanted
        )
    grad_z = gradients.get(0)  # None if the result does not depend on z
    of_product: tuple[Tensor | None, ...] = (None, None)
    if grad_z is not None:
        of_product = _product_gradients(grad_z, x, weight, forward.mode, needs_x, needs_weight)
    return (
        *of_product,
        column_sum,
        *(gradients.get(k + 1) for k in range(len(needs))),
    )


def _product_and_pass(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    prepared: Prepared,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The result by a product and a kernel over it, and what a backward pass needs: the pre-activation, unless it is
    the result, and a reduction's result where its gradient needs that."""
    z = _pre_activation(x, weight, bias, prepared)
    if program == schema.IDENTITY and reduction == "none" and out_dtype == z.dtype:
        return z, None, None
    if reduction == "none":
        return schema.pointwise(z, operands, program, out_dtype), z, None
    if reduction not in NEEDS_RESULT:
        return schema.reduce(z, operands, program, reduction, (1,), out_dtype), z, None
    y = schema.reduce(z, operands, program, reduction, (1,), kept_dtype(z, operands))
    return y.to(out_dtype, copy=True), z, y.unsqueeze(1)


def is_forced(x: Tensor, mode: str = "") -> bool:
    """Whether products of x need more than cuBLAS with PyTorch's setting: in `mode`, or if that is empty, in the mode
    that holds now.

    In compiled code the answer is yes as soon as any mode was asked for, because operators read the mode when they run.
    """
    if x.dtype != torch.float32 or not (x.device.type == "cuda" or stands_in_for(x.device)):
        return False
    if torch.compiler.is_compiling():
        return process.opted_in
    mode = product_mode(mode)
    return mode in SPLIT_MODES or (mode == "tf32") != allows_tf32()


def _pre_activation(x: Tensor, weight: Tensor, bias: Tensor | None, prepared: Prepared) -> Tensor:
    if is_forced(x):
        return schema.linear(x, weight, bias, [], schema.IDENTITY, x.dtype, *prepared)
    return F.linear(x, weight, bias)


def _pre_activation_again(x: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    """In a backward pass, whose forward pass was in `mode`."""
    if not is_forced(x, mode):
        return cublas_linear(x, weight, bias, mode)
    z = schema.product(x, weight, mode)
    return z if bias is None else z.add_(bias)


def _product_gradients(
    grad_z: Tensor, x: Tensor, weight: Tensor, mode: str, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight. Kernels of ours multiply as in the direct path; compiled code has PyTorch's."""
    issuer = "call" if is_traced(grad_z, x, weight) else issuer_of_products(x, weight, mode)
    multiply = functools.partial(_product, mode=mode, issuer=issuer)
    return (
        multiply(grad_z, weight.t()) if needs_x else None,
        weight_gradient(grad_z, x, weight, multiply) if needs_weight else None,
    )


def _product(a: Tensor, b: Tensor, mode: str, issuer: str) -> Tensor:
    """`a @ b.T`, by PyTorch where no other precision is asked for and the layer does not wait for the host."""
    if issuer == "training" or is_forced(a, mode):
        return schema.product(a, b, mode, issuer)
    return torch.mm(a, b.t())


def _sum_of_rows(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return schema.reduce(grad, [], schema.IDENTITY, "sum", (0,), dtype)


def _composed_linear(forward: Any, out_dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of the layer's tensors that computes it by PyTorch's own operations."""
    program = Program.parse(forward.program)

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None, *operands: Tensor) -> Tensor:
        if forward.reduction == "none":
            return composed.linear(x, weight, bias, operands, program, out_dtype)
        return composed.linear_reduce(x, weight, bias, operands, program, forward.reduction, out_dtype)

    return compute


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    prepared: Prepared = UNPREPARED,
    recompute: bool = False,
) -> Tensor:
    """Calls the linear operator, or with `reduction` the one that reduces rows; by autograd if a gradient is needed.

    recompute: a backward pass computes the pre-activation again, where the forward pass would keep one.
    """
    y: Tensor
    if torch.compiler.is_dynamo_compiling():
        inductor.register()
    if needs_gradient(x, weight, bias, *operands):
        if not torch.compiler.is_compiling():  # Dynamo does not trace what parses a program
            arguments = LinearArguments(x, weight, bias, operands, Program.parse(program), reduction, out_dtype)
            if hands_gradient_on(arguments):
                y = LinearSum.apply(program, *prepared, x, weight, bias, *operands)
                return y
        is_kept = program == schema.IDENTITY and reduction == "none"  # the result is the pre-activation
        recompute = recompute and not is_kept and not torch.compiler.is_compiling()
        y = Linear.apply(program, reduction, out_dtype, recompute, *prepared, x, weight, bias, *operands)
        return y
    if reduction == "none":
        return schema.linear(x, weight, bias, operands, program, out_dtype, *prepared)
    return schema.linear_reduce(x, weight, bias, operands, program, reduction, out_dtype, *prepared)
