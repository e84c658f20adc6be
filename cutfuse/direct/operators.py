"""The CUDA implementations of the operators, which take the direct path (csrc/call) if they can.

An operator's key has the number of its program in place of a callable's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..ops import cuda, cuda_backward
from ..planning.linear_plan import LinearArguments
from .call_plans import plan_backward, plan_joined_call, plan_linear, plan_pointwise, plan_reduce
from .calls import remember

if TYPE_CHECKING:
    from .._C import CallFunction, CallPlan
    from .._C import call_backward_operator as call_backward_operator
    from .._C import call_joined_operator as call_joined_operator
    from .._C import call_linear_operator as call_linear_operator
    from .._C import call_pointwise_operator as call_pointwise_operator
    from .._C import call_reduce_operator as call_reduce_operator
else:
    try:
        from .._C import (
            call_backward_operator,
            call_joined_operator,
            call_linear_operator,
            call_pointwise_operator,
            call_reduce_operator,
        )
    except ImportError:  # the general path raises an ImportError that tells what to do
        call_backward_operator = call_linear_operator = lambda *given: None
        call_pointwise_operator = call_reduce_operator = call_joined_operator = call_linear_operator


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
        if y is not None:
            _remember_linear(given, program, general)
        return general
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
        if y is not None:
            _remember_linear(given, program, general)
        return general
    return y


def joined(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    y: Tensor | None = call_joined_operator(x, weights, biases)
    if y is None or y is NotImplemented:
        general = cuda.joined(x, weights, biases)
        if y is not None:
            make_plan = functools.partial(plan_joined_call, x, weights, biases, general)
            _remember(native.core.CallFunction.joined_operator, (x, weights, biases), (x, *weights), make_plan)
        return general
    return y


def pointwise(x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype) -> Tensor:
    given = x, operands, _number_of(program), out_dtype
    y: Tensor | None = call_pointwise_operator(*given)
    if y is None or y is NotImplemented:
        general = cuda.pointwise(x, operands, program, out_dtype)
        if y is not None:
            make_plan = functools.partial(plan_pointwise, x, operands, Program.parse(program), general)
            _remember(native.core.CallFunction.pointwise_operator, given, (x, *operands), make_plan)
        return general
    return y


def reduce(
    x: Tensor, operands: Sequence[Tensor], program: str, reduction: str, dims: Sequence[int], out_dtype: torch.dtype
) -> Tensor:
    given = x, operands, _number_of(program), reduction, dims, out_dtype
    y: Tensor | None = call_reduce_operator(*given)
    if y is None or y is NotImplemented:
        general = cuda.reduce(x, operands, program, reduction, dims, out_dtype)
        if y is not None:
            make_plan = functools.partial(
                plan_reduce, x, operands, Program.parse(program), reduction, tuple(dims), general
            )
            _remember(native.core.CallFunction.reduce_operator, given, (x, *operands), make_plan)
        return general
    return y


def pointwise_backward(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    result: Tensor | None,
    wanted: Sequence[int],
    sums_columns: bool,
) -> list[Tensor]:
    if result is not None:
        return cuda_backward.pointwise_backward(grad, x, operands, program, reduction, result, wanted, sums_columns)
    given = grad, x, operands, _number_of(program), wanted, sums_columns
    gradients: list[Tensor] | None = call_backward_operator(*given)
    if gradients is None or gradients is NotImplemented:
        general = cuda_backward.pointwise_backward(grad, x, operands, program, reduction, None, wanted, sums_columns)
        if gradients is not None:
            make_plan = functools.partial(
                plan_backward, grad, x, operands, Program.parse(program), wanted, sums_columns, general
            )
            _remember(native.core.CallFunction.backward_operator, given, (grad, x, *operands), make_plan)
        return general
    return gradients


def _remember_linear(given: tuple[Any, ...], program: str, y: Tensor) -> None:
    x, weight, bias, operands, _, reduction, out_dtype = given
    arguments = LinearArguments(x, weight, bias, operands, Program.parse(program), reduction, out_dtype)
    make_plan = functools.partial(plan_linear, arguments, y)
    _remember(native.core.CallFunction.linear_operator, given, (x, weight, *operands), make_plan)


def _remember(
    function: CallFunction, given: tuple[Any, ...], tensors: Sequence[Tensor], make_plan: Callable[[], CallPlan | None]
) -> None:
    """Remembers a call for later ones with its key. tensors: all calls with an empty one take the general path."""
    is_empty = not all(t.numel() for t in tensors)
    remember(function, given, lambda: 0, native.core.general_call if is_empty else make_plan)


@functools.lru_cache(maxsize=4096)
def _number_of(program: str) -> int:
    return native.core.new_callable_number()
