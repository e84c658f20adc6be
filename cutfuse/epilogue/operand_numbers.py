"""Operands that are numbers: bound to a callable, and put in place in an Epilogue."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from cutfuse.epilogue.errors import evaluated_while_compiling, refuse
from cutfuse.epilogue.retype import retype
from cutfuse.epilogue.trace import Epilogue, epilogue_called
from cutfuse.epilogue.types import ValueTypes

Number = int | float
Numbers = tuple[Number | None, ...]  # for each operand its number, or None where it is a tensor


def bind(fn: Callable[..., Any], numbers: Numbers) -> Callable[..., Any]:
    """`fn` with its operands that are numbers in place; itself where `numbers` is empty."""
    if not numbers:
        return fn

    def bound(z: Any, *tensors: Any) -> Any:
        taken = 0
        operands = []
        for number in numbers:
            operands.append(tensors[taken] if number is None else number)
            taken += number is None
        return fn(z, *operands)

    return bound


def substitute(epilogue: Epilogue, numbers: Numbers, types: ValueTypes) -> Epilogue:
    """The epilogue with its operands that are numbers in place."""
    # As text, since torch.compile may hold a float that changes as a symbol.
    return _substitute(epilogue.name, tuple([None if n is None else _digits(n) for n in numbers]), types)


def _digits(number: Number) -> str:
    """A number as a constant for Dynamo: in hexadecimal -0.0 is not 0.0. An integer has no "0x1.8p+1"."""
    if isinstance(number, bool):
        return repr(number)
    if isinstance(number, float):
        return number.hex()
    try:
        float(number)
    except OverflowError:
        refuse("an operand is an integer beyond the range of floating-point numbers")
    return repr(operator.index(number))


def _to_number_again(digits: str) -> Number:
    if digits in ("True", "False"):
        return digits == "True"
    return int(digits) if digits.removeprefix("-").isdigit() else float.fromhex(digits)


@evaluated_while_compiling
def _substitute(name: str, numbers: tuple[str | None, ...], types: ValueTypes) -> Epilogue:
    """The epilogue of that name with its operands that are numbers in place."""
    return _substitute_once(name, numbers, types, torch.get_default_dtype())


@functools.lru_cache(maxsize=256)
def _substitute_once(
    name: str, numbers: tuple[str | None, ...], types: ValueTypes, default_dtype: torch.dtype
) -> Epilogue:
    # The default dtype is what a mask times a number is of.
    values = [None if digits is None else _to_number_again(digits) for digits in numbers]
    return Epilogue.from_expression(retype(epilogue_called(name).expression, types, values), len(types) - 1)
