"""From what the user passes as epilogue= to an Epilogue, without tracing the same thing twice.

Operands that are numbers are bound to a callable, and put in place in an Epilogue.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._device import DeviceContext

from cutfuse import dynamo
from cutfuse.epilogue import compiled
from cutfuse.epilogue.calls import retype
from cutfuse.epilogue.errors import EpilogueError, OperandCountError, counted, evaluated_while_compiling, refuse
from cutfuse.epilogue.expression import input
from cutfuse.epilogue.fingerprint import detach, fingerprint
from cutfuse.epilogue.reads import NoKeyError, remember
from cutfuse.epilogue.trace import Epilogue, epilogue_called, trace
from cutfuse.epilogue.types import ValueTypes, unknown_types

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


_EPILOGUES_LIMIT = 1024

_epilogues: dict[Hashable, Epilogue] = {}
has_function_modes = torch._C._len_torch_function_stack


def resolve(
    epilogue: Callable[..., Any] | Epilogue | None,
    operand_count: int = 0,
    types: ValueTypes | None = None,
    numbers: Numbers = (),
) -> Epilogue:
    """The Epilogue for a callable and a number of tensor operands; None is the identity.

    types: of the pre-activation and the tensor operands. Without them it serves tensors of every type.
    numbers: where operands are numbers, for each operand its number or None. They are put in place, and need `types`.

    A callable is traced once, and again whenever anything that its trace could depend on has changed. Works inside a
    function that torch.compile compiles, where the trace is made while compiling and guarded like any Python code.
    Raises EpilogueError where the callable cannot be traced, does not fit a program or takes other operands.
    """
    if epilogue is None:
        return identity(operand_count)
    if isinstance(epilogue, Epilogue):
        return _resolve_prebuilt(epilogue, operand_count, types, numbers)
    if types is None:
        types = unknown_types(operand_count)
    if torch.compiler.is_dynamo_compiling():
        try:
            return compiled.trace(bind(epilogue, numbers), types)
        except EpilogueError as error:
            refuse(error.args[0])
    if has_function_modes() and may_change_traces():
        return _trace(epilogue, numbers, types)
    key = fingerprint(epilogue)
    if key is None or any(number != number for number in numbers):  # a NaN is found in containers by identity
        return _trace(epilogue, numbers, types)
    found = _epilogues.get(_complete(key, numbers, types))
    return _trace_once(epilogue, numbers, types) if found is None else found


def _complete(key: int, numbers: Numbers, types: ValueTypes, default_dtype: torch.dtype | None = None) -> Hashable:
    """All that a trace depends on: a mask times a number is of the default dtype."""
    return key, fingerprint(numbers) if numbers else (), types, default_dtype or torch.get_default_dtype()


def _resolve_prebuilt(epilogue: Epilogue, operand_count: int, types: ValueTypes | None, numbers: Numbers) -> Epilogue:
    """Raises EpilogueError where a prebuilt epilogue takes another number of operands."""
    given = len(numbers) or operand_count
    if epilogue.operand_count != given:
        program = f"the epilogue with the program {epilogue.text!r}"  # its repr is more than Dynamo of torch 2.8 traces
        refuse(f"{program} takes {counted(epilogue.operand_count, 'operand')}, and is given {given}", OperandCountError)
    if types is None:
        return epilogue
    if numbers:
        return substitute(epilogue, numbers, types)
    if torch.compiler.is_dynamo_compiling():
        return compiled.for_types(epilogue.name, types)
    return epilogue.for_types(types)


def _trace(epilogue: Callable[..., Any], numbers: Numbers, types: ValueTypes, is_kept: bool = False) -> Epilogue:
    return Epilogue.from_expression(trace(bind(epilogue, numbers), types, is_kept), len(types) - 1)


@dynamo.disable  # after a graph break Dynamo would try to compile this
def _trace_once(epilogue: Callable[..., Any], numbers: Numbers, types: ValueTypes) -> Epilogue:
    """Traces a callable that has a key, and remembers it.

    What is traced is a copy. Were it the callable itself, another thread could change a global while it is traced and
    change it back, and the key, taken before and after, would be that of another trace.
    """
    default_dtype = torch.get_default_dtype()
    try:
        copy = detach(epilogue)
        key = fingerprint(copy)
    except NoKeyError:  # what it reads has changed since its key was taken
        key = None
    if key is None or (numbers and fingerprint(numbers) is None):
        return _trace(epilogue, numbers, types)
    try:
        traced = _trace(copy, numbers, types, is_kept=True)
    except Exception:  # once more, for an error with the callable's own name and lines
        return _trace(epilogue, numbers, types, is_kept=True)
    # The copy shares classes of torch.nn and functions of torch with the callable; they may have changed meanwhile.
    if fingerprint(copy) != key or torch.get_default_dtype() is not default_dtype:
        return traced
    return remember(_epilogues, _complete(key, numbers, types, default_dtype), traced, _EPILOGUES_LIMIT)


def may_change_traces() -> bool:
    """Whether a TorchFunctionMode sees the calls of a trace. The default device's only sees to what makes tensors."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(type(mode) is not DeviceContext for mode in modes)


@functools.lru_cache(maxsize=1)
def _identity() -> Epilogue:
    return Epilogue.from_expression(input())


@evaluated_while_compiling
def identity(operand_count: int) -> Epilogue:
    """The epilogue that gives the pre-activation itself. Raises EpilogueError where there are operands."""
    if operand_count:
        raise OperandCountError(
            f"{counted(operand_count, 'operand')}, but no epilogue to use them: pass epilogue=lambda z, r: ..."
        )
    return _identity()


IDENTITY = 1  # the number of None


def recognised(
    epilogue: Callable[..., Any] | Epilogue | None, numbers: Numbers, types: ValueTypes
) -> tuple[int, Epilogue] | None:
    """The number that `recognise` gives for a callable, and the Epilogue of what has that number.

    numbers and types: as for `resolve`, which is to be called before: nothing is traced here. None where the callable
    has no number, or has changed since. The Epilogue is found by the number, so that a plan for it holds wherever
    `recognise` gives that number.
    """
    if epilogue is None:
        return IDENTITY, identity(0)
    if has_function_modes() and may_change_traces():
        return None
    number = fingerprint(epilogue)
    if number is None:
        return None
    if isinstance(epilogue, Epilogue):  # never changes
        return number, resolve(epilogue, len(types) - 1, types, numbers)
    found = _epilogues.get(_complete(number, numbers, types))
    return None if found is None else (number, found)
