"""From what the user passes as epilogue= to an Epilogue, without tracing the same thing twice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._device import DeviceContext

from cutfuse import dynamo
from cutfuse.epilogue import compiled
from cutfuse.epilogue.detach import detach
from cutfuse.epilogue.errors import EpilogueError, OperandCountError, evaluated_while_compiling, refuse
from cutfuse.epilogue.expression import input
from cutfuse.epilogue.fingerprint import NoKeyError, fingerprint, remember
from cutfuse.epilogue.trace import Epilogue, trace
from cutfuse.epilogue.types import ValueTypes, unknown_types

_EPILOGUES_LIMIT = 1024

_epilogues: dict[Hashable, Epilogue] = {}
_has_function_modes = torch._C._len_torch_function_stack


def resolve(
    epilogue: Callable[..., Any] | Epilogue | None, operand_count: int = 0, types: ValueTypes | None = None
) -> Epilogue:
    """The Epilogue for a callable and a number of tensor operands; None is the identity.

    types: of the pre-activation and the operands. Without them it serves tensors of every type.

    A callable is traced once, and again whenever anything that its trace could depend on has changed. Works inside a
    function that torch.compile compiles, where the trace is made while compiling and guarded like any Python code.
    Raises EpilogueError where the callable cannot be traced, does not fit a program or takes other operands.
    """
    if epilogue is None:
        return identity(operand_count)
    if isinstance(epilogue, Epilogue):
        check_operands(epilogue, operand_count)
        if types is None:
            return epilogue
        return (
            compiled.for_types(epilogue.name, types)
            if torch.compiler.is_dynamo_compiling()
            else epilogue.for_types(types)
        )
    if types is None:
        types = unknown_types(operand_count)
    if torch.compiler.is_dynamo_compiling():
        try:
            return compiled.trace(epilogue, types)
        except EpilogueError as error:
            refuse(error.args[0])
    key = None if _has_function_modes() and _may_change_traces() else fingerprint(epilogue)
    if key is None:
        return Epilogue.from_expression(trace(epilogue, types), operand_count)
    found = _epilogues.get((key, types))
    return _trace_once(epilogue, types) if found is None else found


@dynamo.disable  # after a graph break Dynamo would try to compile this
def _trace_once(epilogue: Callable[..., Any], types: ValueTypes) -> Epilogue:
    """Traces a callable that has a key, and remembers it.

    What is traced is a copy. Were it the callable itself, another thread could change a global while it is traced and
    change it back, and the key, taken before and after, would be that of another trace.
    """
    try:
        copy = detach(epilogue)
        key = fingerprint(copy)
    except NoKeyError:  # what it reads has changed since its key was taken
        key = None
    if key is None:
        return Epilogue.from_expression(trace(epilogue, types), len(types) - 1)
    try:
        traced = Epilogue.from_expression(trace(copy, types), len(types) - 1)
    except Exception:  # once more, for an error with the callable's own name and lines
        return Epilogue.from_expression(trace(epilogue, types), len(types) - 1)
    # The copy shares classes of torch.nn and functions of torch with the callable; they may have changed meanwhile.
    if fingerprint(copy) != key:
        return traced
    return remember(_epilogues, (key, types), traced, _EPILOGUES_LIMIT)


def _may_change_traces() -> bool:
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
            f"{operand_count} operands, but no epilogue to use them: pass epilogue=lambda z, r: ..."
        )
    return _identity()


def check_operands(epilogue: Epilogue, operand_count: int) -> Epilogue:
    """Raises EpilogueError where a prebuilt epilogue takes another number of operands."""
    if epilogue.operand_count != operand_count:
        program = f"the epilogue with the program {epilogue.text!r}"  # its repr is more than Dynamo of torch 2.8 traces
        refuse(
            f"{program} takes {epilogue.operand_count} operands, but operands= has {operand_count}", OperandCountError
        )
    return epilogue
