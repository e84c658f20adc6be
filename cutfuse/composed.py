"""The same results from plain PyTorch operations: for every device and type that no kernel serves, and for the tests.

Everything here is differentiable by PyTorch itself. The arithmetic is fp32, or fp64 where an input is fp64, with one
rounding to the result's type at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .epilogue import Epilogue, EpilogueError, Program, evaluate
from .epilogue.program import arithmetic_dtype
from .epilogue.table import REDUCTIONS
from .epilogue.trace import ONE_SCALAR, check_arity


class PyTorchCall(NamedTuple):
    """A call of cutfuse that PyTorch's own operations compute, and that has no program: what `explain` describes."""

    name: str  # "linear", or a reduction's
    tensors: list[Tensor]  # what it reads: x, then a weight if there is one
    because: str  # why
    dims: tuple[int, ...] = ()  # of a reduction
    flops: int = 0  # of a product
    bits: str = ""  # what is to say of them, with `rounding="eager"`


def apply(program: Program, x: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """The program's values, unrounded, in x's shape; x itself where the program is the identity."""
    return evaluate(program, x.to(arithmetic_dtype(x, operands)), operands)


def pointwise(x: Tensor, operands: Sequence[Tensor], program: Program, out_dtype: torch.dtype) -> Tensor:
    if len(program.instructions) == 0:
        return x.to(out_dtype, copy=True)
    return apply(program, x, operands).to(out_dtype)


def reduce(
    x: Tensor,
    operands: Sequence[Tensor],
    program: Program,
    reduction: str,
    dims: tuple[int, ...],
    out_dtype: torch.dtype,
    keepdim: bool = False,
) -> Tensor:
    y = apply(program, x, operands)
    return REDUCTIONS[reduction](y, dims, keepdim=keepdim).to(out_dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: Program,
    reduction: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return after_product(F.linear(x, weight, bias), operands, program, reduction, out_dtype)


def linear_eagerly(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Callable[..., Tensor] | Epilogue | None,
    operands: Sequence[Tensor | float],
    reduction: str | None,
    keepdim: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """What PyTorch computes in eager mode: each operation as the caller wrote it, in the tensors' types."""
    y = z = F.linear(x, weight, bias)
    if epilogue is not None:
        y = _call_eagerly(epilogue, z, operands)
    if y.shape != z.shape:
        y = y.broadcast_to(torch.broadcast_shapes(y.shape, z.shape)).reshape(z.shape)
    if reduction is not None:
        y = REDUCTIONS[reduction](y, -1, keepdim=keepdim)
    return y if out_dtype is None else y.to(out_dtype)


def _call_eagerly(epilogue: Callable[..., Tensor] | Epilogue, z: Tensor, operands: Sequence[Tensor | float]) -> Tensor:
    """What the epilogue gives, in memory of its own. Raises EpilogueError where that is no tensor."""
    try:
        y = (epilogue.run_eagerly if isinstance(epilogue, Epilogue) else epilogue)(z, *operands)
    except TypeError as error:
        if not torch.compiler.is_compiling() and not isinstance(epilogue, Epilogue):
            check_arity(epilogue, len(operands), error)
        raise
    if not isinstance(y, Tensor):
        raise EpilogueError(f"the epilogue returns an object of type {type(y).__name__}: {ONE_SCALAR}")
    return y.clone() if any(y is operand for operand in operands) else y


def after_product(
    z: Tensor, operands: Sequence[Tensor], program: Program, reduction: str, out_dtype: torch.dtype
) -> Tensor:
    """What follows a product z [M, N]."""
    if reduction == "none":
        return apply(program, z, operands).to(out_dtype)
    return reduce(z, operands, program, reduction, (1,), out_dtype)
