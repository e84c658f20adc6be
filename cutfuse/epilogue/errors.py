"""The error that everything about an epilogue raises, and how it gets out of torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

import torch

from cutfuse import dynamo

_P = ParamSpec("_P")
_R = TypeVar("_R")


class EpilogueError(ValueError, TypeError):
    """An epilogue that cannot be traced, does not fit a program or takes another number of operands than it is given.

    The message names the operation, the limit or the numbers, and what to do.
    """


class OperandCountError(EpilogueError):
    """An epilogue that takes another number of operands than it is given: users know it as an EpilogueError."""


class CompiledEpilogueError(EpilogueError, AssertionError):
    """An EpilogueError while torch.compile traces.

    Dynamo wraps what a function evaluated while tracing raises in an error of its own, but for few types. An
    AssertionError, the only public one of these, reaches the caller of the compiled function as it is.
    """


def counted(count: int, noun: str) -> str:
    """Such as "1 operand" or "2 operands"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def evaluated_while_compiling(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` as Dynamo takes it: evaluated while it traces, its result a constant, its EpilogueError the user's."""

    @dynamo.assume_constant_result
    @functools.wraps(function)
    def evaluated(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except EpilogueError as error:
            if torch._guards.TracingContext.try_get() is None:  # called without Dynamo
                raise
            raise CompiledEpilogueError(str(error)) from error

    return evaluated


def refuse(message: str, kind: type[EpilogueError] = EpilogueError) -> NoReturn:
    """Raises an EpilogueError; also where Dynamo traces the caller, and a `raise` would end as an error of Dynamo's."""
    if torch.compiler.is_dynamo_compiling():
        _refuse_while_compiling(message)
    raise kind(message)


@evaluated_while_compiling
def _refuse_while_compiling(message: str) -> NoReturn:
    raise EpilogueError(message)
