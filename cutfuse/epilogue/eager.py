"""Epilogues that round as PyTorch does in eager mode: the pre-activation, and the value of each function, to its type.

Within a trace of such types (`ValueType.rounds`) each call of a function gives its op and, behind it, the op that
rounds to the value's type: `half`, `bfloat16`, or `float`, which changes no fp32 value but keeps a product and a sum
from being one multiply-add. A function of which it is not known where PyTorch rounds, or by which formula it computes,
is refused.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from cutfuse.epilogue import compositions as composed
from cutfuse.epilogue.compositions import ROUNDING
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, apply, input, to_expression, to_number, to_symbolic, unmarked
from cutfuse.epilogue.table import NUMBERS, STEPS, UNKNOWN_STEPS, compositions, describe_callable, op_table, rounding_of
from cutfuse.epilogue.types import ValueType


class _Thread(threading.local):
    is_inside = False  # of one function of PyTorch's, which rounds at its end


_thread = _Thread()

_SHORT = (torch.float16, torch.bfloat16)


def rounded_input(type: ValueType, rounds: bool) -> Expr:
    """The pre-activation, which PyTorch's product rounds to its type."""
    return _round(input(type), ()) if rounds else input(type)


def call(
    compute: Callable[..., Expr], function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Expr:
    """`compute`, which gives what a function of PyTorch's computes, with the value rounded where PyTorch rounds.

    Raises EpilogueError where that is not known.
    """
    if _thread.is_inside:
        return compute(function, arguments, keywords)
    composition = compositions().get(function)
    if composition is composed.div:
        return _divide(compute, function, arguments, keywords)
    given = (*arguments, *keywords.values())
    if composition is composed.power:
        base, exponent = given[:2]
        if _is_number(base) or (_is_number(exponent) and to_number(exponent, "the exponent") < -1):
            _refuse(function, "it is not known where PyTorch rounds in it")
    if rounding_of(composition) == STEPS:
        found = compute(function, arguments, keywords)
        # What is no composition after all, as a power of another exponent, is one function.
        is_op = unmarked(found).op in op_table().callables.get(function, ())
        return _compute(compute, function, arguments, keywords) if is_op else found
    return _compute(compute, function, arguments, keywords)


def without_last_rounding(root: Expr, dtype: torch.dtype) -> Expr:
    """The expression of a value that is stored as one of this type, which rounds it."""
    is_rounded = root.op is not None and root.op.name == ROUNDING.get(dtype)
    return root.arguments[0] if is_rounded else root


def _divide(
    compute: Callable[..., Expr], function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Expr:
    """By a number PyTorch multiplies by its fp32 reciprocal, and of a number it multiplies the rounded reciprocal."""
    if len(arguments) != 2 or any(keywords.values()):
        _refuse(function, "it is not known where PyTorch rounds in it")
    a, b = map(to_expression, arguments)
    if b.number is not None and b.type.is_number:
        reciprocal = torch.ones((), device="cpu").div_(torch.tensor(b.number, dtype=torch.float32, device="cpu")).item()
        return _compute(compute, torch.mul, (a, reciprocal), {})
    if a.number is not None:
        quotient: Expr = torch.reciprocal(to_symbolic(b)) * a
        return quotient
    return _compute(compute, function, (a, b), {})


def _compute(
    compute: Callable[..., Expr], function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Expr:
    given = (*arguments, *keywords.values())
    composition = compositions().get(function)
    rounding = rounding_of(composition)
    if rounding == UNKNOWN_STEPS:
        _refuse(function, "it is not known where PyTorch rounds in it")
    if composition is not None and keywords.get("alpha", 1) != 1:
        _refuse(function, "PyTorch rounds once behind the product and the sum")
    if keywords.get("decimals") is not None:
        _refuse(function, "it is not known where PyTorch rounds in it")
    _thread.is_inside = True
    try:
        found = compute(function, arguments, keywords)
    finally:
        _thread.is_inside = False
    value = unmarked(found)
    if value.op is not None and value.op.eager == "none":
        _refuse(function, "the formula of PyTorch's kernels is not known")
    if value.op is not None and value.op.eager.startswith("(") and found.type.dtype is torch.float32:
        _refuse(function, "its values in float32 are not compared with those of PyTorch's kernels")
    expressions = [item for item in given if isinstance(item, Expr)]
    dtypes = {item.type.dtype for item in expressions if item.type.dtype in _SHORT}
    if composition is None or rounding == NUMBERS or composition is composed.power:
        numbers = value.arguments if composition is None else map(to_expression, filter(_is_number, given))
        for item in numbers:
            if item.number is not None and not all(_holds(dtype, item.number) for dtype in dtypes):
                _refuse(function, f"PyTorch rounds {item.number:g} to the type of the values")
    for item in expressions:
        is_rounded = item.type.is_scalar and not item.type.is_number and item.type.dtype is not found.type.dtype
        if is_rounded and not item.is_boolean:
            _refuse(function, "PyTorch rounds a tensor without dimensions to the type of the others")
    return _round(found, expressions)


def _round(found: Expr, given: Sequence[Any]) -> Expr:
    """The value of a function of `given`, as one of its type. What is chosen of values of that type is."""
    type, value = found.type, unmarked(found)
    if type.is_boolean or found.is_number or any(value is unmarked(item) for item in given if isinstance(item, Expr)):
        return found
    if type.dtype not in ROUNDING:
        raise EpilogueError(f"PyTorch computes in {type.dtype}")
    if value.op is not None:
        is_chosen = value.op.eager == "kept" and all(_holds(type.dtype, number) for number in value.parameters)
        if is_chosen and all(_is_kept(argument, type.dtype, given) for argument in value.arguments):
            return found
        if value.op.name == ROUNDING[type.dtype]:
            return found
    return apply(op_table().op(ROUNDING[type.dtype]), (found,), (), type)


def _is_kept(argument: Expr, dtype: torch.dtype, given: Sequence[Any]) -> bool:
    if argument.number is not None:
        return _holds(dtype, argument.number)
    is_given = any(argument is item for item in given)
    return argument.is_boolean or (is_given and argument.type.dtype is dtype)


def _is_number(value: Any) -> bool:
    return value.is_number if isinstance(value, Expr) else isinstance(value, int | float)


@functools.lru_cache(maxsize=1024)
def _holds(dtype: torch.dtype, number: float) -> bool:
    """Whether a type has this number."""
    return torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item() == number


def _refuse(function: Callable[..., Any], why: str) -> NoReturn:
    raise EpilogueError(f"{describe_callable(function)}: {why}")
