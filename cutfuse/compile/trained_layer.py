"""A trained layer of 16 bits whose backward pass does not need the pre-activation.

Storing the pre-activation takes a fused kernel as long as a pass of its own over it. A residual that is added needs
nothing of it, and a relu nothing but the result, which the next layer keeps anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import composed
from ..epilogue import Epilogue, Program
from ..epilogue.affine import Part
from ..gradients.elementwise import differentiate
from ..ops import schema

_RELU = "operands=0; relu z"


def why_kept(dtype: torch.dtype, reduction: str, epilogue: Epilogue, operands: Iterable[Tensor]) -> str:
    """Why a trained layer is none of these; empty where it is one. dtype: of the product."""
    if dtype.itemsize != 2:
        return f"its product is of {dtype}"
    if reduction != "none":
        return "its rows are reduced"
    if is_relu(epilogue):
        return ""
    if epilogue.affine is None:
        return "its derivative depends on the product"
    trained = {k for k, operand in enumerate(operands) if operand.requires_grad}
    is_factor = trained.intersection(epilogue.affine.slope_operands)
    return "the gradient of a factor depends on the product" if is_factor else ""


def is_relu(epilogue: Epilogue) -> bool:
    return epilogue.text == _RELU


def _values_needed(epilogue: Epilogue) -> set[int]:
    """The indices of the operands whose values a gradient depends on: not those that are added, scaled by numbers."""
    affine = epilogue.affine
    if affine is None:
        return set()
    factors = set(affine.slope_operands)
    return factors | (set() if _is_sum(affine.intercept) else set(affine.intercept_operands))


def _is_sum(part: Part) -> bool:
    """Whether an expression adds operands, each scaled by numbers."""
    if isinstance(part, float) or part.op is None:
        return True
    arguments = part.arguments
    if part.op.infix in ("+", "-") or part.op.prefix in ("+", "-"):
        return all(map(_is_sum, arguments))
    numbers = [argument.is_number for argument in arguments]
    if part.op.infix == "*" and any(numbers):
        return all(map(_is_sum, arguments))
    return part.op.infix == "/" and numbers[1] and _is_sum(arguments[0])


def _stand_in(shape: torch.Size, dtype: torch.dtype, device: torch.device, is_trained: bool) -> Tensor:
    """A tensor in the place of one whose values make no difference."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_(is_trained)


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
        epilogue = Epilogue.from_text(program)
        ctx.program = program
        ctx.operands = [(operand.shape, operand.dtype) for operand in operands]
        kept = _values_needed(epilogue)
        kept_operands = [operand if k in kept else None for k, operand in enumerate(operands)]
        ctx.save_for_backward(x, weight, y if is_relu(epilogue) else None, *kept_operands)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *needs = ctx.needs_input_grad[2:]
        program = Program.parse(ctx.program)
        operands = [
            _stand_in(shape, dtype, grad.device, is_trained) if operand is None else operand
            for operand, (shape, dtype), is_trained in zip(kept, ctx.operands, needs, strict=True)
        ]
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
            None if grad_z is None or not needs_weight else torch.mm(grad_z.t(), x),
            None if grad_z is None or not needs_bias else grad_z.sum(0),
            *rest,
        )
