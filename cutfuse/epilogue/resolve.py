"""From what the user passes as epilogue= to an Epilogue, without tracing the same thing twice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from cutfuse.epilogue import compiled
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import input
from cutfuse.epilogue.fingerprint import fingerprint, remember
from cutfuse.epilogue.trace import Epilogue

_EPILOGUES_LIMIT = 1024

_epilogues: dict[Hashable, Epilogue] = {}


def resolve(epilogue: Callable[..., Any] | Epilogue | None, operand_count: int = 0) -> Epilogue:
    """The Epilogue for a callable and a number of tensor operands; None is the identity.

    A callable is traced once, and again whenever anything that its trace could depend on has changed. Works inside a
    function that torch.compile compiles, where the trace is made while compiling and guarded like any Python code.
    Raises EpilogueError where the callable cannot be traced, does not fit a program or takes other operands.
    """
    if epilogue is None:
        return identity(operand_count)
    if isinstance(epilogue, Epilogue):
        return check_operands(epilogue, operand_count)
    if torch.compiler.is_dynamo_compiling():
        return compiled.trace(epilogue, operand_count)
    key = fingerprint(epilogue)
    if key is None:
        return Epilogue(epilogue, operand_count)
    found = _epilogues.get((key, operand_count))
    if found is None:
        found = Epilogue(epilogue, operand_count)
        remember(_epilogues, (key, operand_count), found, _EPILOGUES_LIMIT)
    return found


@functools.lru_cache(maxsize=1)
def _identity() -> Epilogue:
    return Epilogue.from_expression(input())


@torch.compiler.assume_constant_result
def identity(operand_count: int) -> Epilogue:
    """The epilogue that gives the pre-activation itself. Raises EpilogueError where there are operands."""
    if operand_count:
        raise EpilogueError(f"{operand_count} operands, but no epilogue to use them: pass epilogue=lambda z, r: ...")
    return _identity()


def check_operands(epilogue: Epilogue, operand_count: int) -> Epilogue:
    """Raises EpilogueError where a prebuilt epilogue takes another number of operands."""
    if epilogue.operand_count != operand_count:
        raise EpilogueError(f"{epilogue!r} takes {epilogue.operand_count} operands, but operands= has {operand_count}")
    return epilogue
