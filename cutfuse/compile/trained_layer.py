"""Trained layers of 16 bits: those whose backward pass needs no pre-activation, and those by passes behind products.

Storing the pre-activation takes a fused kernel as long as a pass of its own over it. A residual that is added needs
nothing of it, and a relu nothing but the result, which the next layer keeps anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import composed
from ..epilogue import Epilogue, Program
from ..layer import schema
from ..layer.autograd import (
    differentiate,
    element_gradients,
    kept_of,
    operand_facts,
    restored,
    wanted_inputs,
    weight_gradient,
)

_RELU = "operands=0; relu z"


def why_kept(dtype: torch.dtype, reduction: str, epilogue: Epilogue, operands: Iterable[Tensor]) -> str:
    """Why a trained layer is none of these; empty where it is one. dtype: of the product."""
    if dtype.itemsize != 2:
        return f"its product is of {dtype}"
    if reduction != "none":
        return "its rows are reduced"
    if epilogue.text == _RELU:
        return ""
    if epilogue.affine is None:
        return "its derivative depends on the product"
    trained = {k for k, operand in enumerate(operands) if operand.requires_grad}
    is_factor = trained.intersection(epilogue.affine.slope_operands)
    return "the gradient of a factor depends on the product" if is_factor else ""


def _save(
    ctx: Any, program: str, x: Tensor, weight: Tensor, value: Tensor | None, operands: tuple[Tensor, ...]
) -> None:
    """Keeps what a backward pass reads. value: z, or the result."""
    ctx.program = program
    ctx.operands = operand_facts(Program.parse(program), operands)
    ctx.save_for_backward(x, weight, value, *kept_of(ctx.operands, operands))


class TrainedLayer(torch.autograd.Function):
    """`program(x @ weight.T + bias, operands)` by the operator forwards, and by PyTorch's operations backwards.

    The program is one of which `why_kept` gives nothing. Inductor fuses the operations with those around them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        out_dtype: torch.dtype,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        y = schema.linear(x, weight, bias, operands, program, out_dtype)
        _save(ctx, program, x, weight, y if program == _RELU else None, operands)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *needs = ctx.needs_input_grad[2:]
        program = Program.parse(ctx.program)
        operands = restored(ctx.operands, kept, grad.device, needs)
        # The derivative is the same at any z if the program is affine, and of relu at its result.
        z = grad.to(x.dtype) if y is None else y
        grad_z, *rest = differentiate(
            lambda z, *operands: composed.pointwise(z, operands, program, grad.dtype),
            (z.detach().requires_grad_(), *operands),
            (needs_x or needs_weight or needs_bias, *needs),
            grad,
        )
        if grad_z is not None:
            grad_z = grad_z.to(x.dtype)  # a relu's result may be of another type
        return (
            None,
            None,
            None if grad_z is None or not needs_x else torch.mm(grad_z, weight),
            None if grad_z is None or not needs_weight else weight_gradient(grad_z, x, weight),
            None if grad_z is None or not needs_bias else grad_z.sum(0),
            *rest,
        )


class PassedLayer(torch.autograd.Function):
    """`program(x @ weight.T + bias, operands)` by PyTorch's product and a kernel of ours, forwards and backwards."""

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        out_dtype: torch.dtype,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        z = F.linear(x, weight, bias)
        _save(ctx, program, x, weight, z, operands)
        return schema.pointwise(z, operands, program, out_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, z, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *needs = ctx.needs_input_grad[2:]
        operands = restored(ctx.operands, kept, grad.device, [False] * len(needs))
        wanted = wanted_inputs([needs_x or needs_weight or needs_bias, *needs], ctx.program)
        gradients, column_sum = element_gradients(
            grad, z, operands, ctx.program, "none", None, wanted, needs_bias and 0 in wanted
        )
        grad_z = gradients.get(0)
        return (
            None,
            None,
            None if grad_z is None or not needs_x else torch.mm(grad_z, weight),
            None if grad_z is None or not needs_weight else weight_gradient(grad_z, x, weight),
            column_sum,
            *(gradients.get(k + 1) for k in range(len(needs))),
        )
