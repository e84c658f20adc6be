"""The CUDA implementations of the linear operators, which take the direct path (csrc/call) if they can."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..ops import cuda
from ..planning.linear_plan import LinearArguments
from .calls import call_linear_operator, remember_linear_operator


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
    given = x, weight, bias, operands, _number_of(program), "none", out_dtype
    y: Tensor | None = call_linear_operator(*given)
    if y is None or y is NotImplemented:
        general = cuda.linear(x, weight, bias, operands, program, out_dtype)
        return _remembered(general, given, program, is_unknown=y is not None)
    return y


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
    given = x, weight, bias, operands, _number_of(program), reduction, out_dtype
    y: Tensor | None = call_linear_operator(*given)
    if y is None or y is NotImplemented:
        general = cuda.linear_reduce(x, weight, bias, operands, program, reduction, out_dtype)
        return _remembered(general, given, program, is_unknown=y is not None)
    return y


def _remembered(y: Tensor, given: tuple[Any, ...], program: str, *, is_unknown: bool) -> Tensor:
    """The result of the general path, which is planned for later calls where it was not known."""
    if is_unknown:
        x, weight, bias, operands, _, reduction, out_dtype = given
        arguments = LinearArguments(x, weight, bias, operands, Program.parse(program), reduction, out_dtype)
        remember_linear_operator(given, arguments, y)
    return y


@functools.lru_cache(maxsize=4096)
def _number_of(program: str) -> int:
    return native.core.new_callable_number()
