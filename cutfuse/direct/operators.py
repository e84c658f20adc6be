"""The CUDA implementations of the linear operators, which take the direct path (csrc/call) if they can."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..ops import cuda
from ..planning.linear_plan import LinearArguments
from .calls import remember_linear_operator


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    out_dtype: torch.dtype,
    snapshot: Tensor | None = None,
    planes: Tensor | None = None,
    scheme: int = 0,
) -> Tensor:
    if snapshot is not None:
        return cuda.linear(x, weight, bias, operands, program, out_dtype, snapshot, planes, scheme)
    arguments = x, weight, bias, operands, program, "none", out_dtype
    return _call(lambda: cuda.linear(x, weight, bias, operands, program, out_dtype), *arguments)


def linear_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    snapshot: Tensor | None = None,
    planes: Tensor | None = None,
    scheme: int = 0,
) -> Tensor:
    if snapshot is not None:
        return cuda.linear_reduce(x, weight, bias, operands, program, reduction, out_dtype, snapshot, planes, scheme)
    arguments = x, weight, bias, operands, program, reduction, out_dtype
    return _call(lambda: cuda.linear_reduce(*arguments), *arguments)


def _call(
    generally: Callable[[], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
) -> Tensor:
    given = x, weight, bias, operands, _number_of(program), reduction, out_dtype
    y: Tensor | None = native.module().call_linear_operator(*given)
    if y is not None and y is not NotImplemented:
        return y
    is_unknown = y is NotImplemented
    y = generally()
    if is_unknown:
        arguments = LinearArguments(x, weight, bias, operands, Program.parse(program), reduction, out_dtype)
        remember_linear_operator(given, arguments, y)
    return y


@functools.lru_cache(maxsize=4096)
def _number_of(program: str) -> int:
    return native.core.new_callable_number()
