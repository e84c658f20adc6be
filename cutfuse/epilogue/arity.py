"""How many operands a callable takes, by its signature, and errors where it is given another number of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from cutfuse.epilogue.calls import is_known
from cutfuse.epilogue.errors import EpilogueError, OperandCountError, counted
from cutfuse.epilogue.registry import compositions, without_annotations
from cutfuse.epilogue.table import Op, describe_callable, op_table

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_arity(fn: Callable[..., Any], operand_count: int, error: Exception) -> None:
    """Raises OperandCountError where fn, whose call raised `error`, does not take z and that many operands.

    An EpilogueError of a Python function's is of its body: a call with other arguments does not come to that.
    """
    function, bound, keywords = _without_partial(fn)
    if isinstance(error, EpilogueError) and not is_known(function):
        return
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*bound, *[None] * (1 + operand_count), **keywords)
    except TypeError:
        raise OperandCountError(
            f"the epilogue {_name(function)}{without_annotations(signature)} is called with the pre-activation and "
            f"{counted(operand_count, 'operand')}"
        ) from error


def check_variadic(fn: Callable[..., Any], operand_count: int, error: Exception) -> None:
    """Raises EpilogueError where fn takes any number of operands, so that the count of those it lacks is unknown."""
    signature = _signature(fn)
    kinds = set() if signature is None else {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        raise EpilogueError(
            f"the epilogue takes any number of arguments, and fails with {counted(operand_count, 'operand')} "
            f"({error}): say how many it has, Epilogue(fn, operand_count=...)"
        ) from error


def count_operands(fn: Callable[..., Any]) -> int:
    """How many arguments without a default a callable takes after the first."""
    signature = _signature(fn)
    parameters = [] if signature is None else list(signature.parameters.values())
    required = [item for item in parameters if item.kind in _POSITIONAL and item.default is item.empty]
    return max(len(required) - 1, 0)


def _without_partial(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function inside of a functools.partial, and what it is given there; any other callable and nothing."""
    if isinstance(fn, functools.partial):
        return fn.func, fn.args, fn.keywords
    return fn, (), {}


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """A callable's signature, by the language's own tables for functions of PyTorch that have none in Python."""
    try:
        return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        pass
    if not callable(fn):
        return None
    if fn in compositions():
        return inspect.signature(compositions()[fn])
    candidates = op_table().callables.get(fn)
    return _signature_of_op(candidates[0]) if candidates else None


def _signature_of_op(op: Op) -> inspect.Signature:
    positional, by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            *(inspect.Parameter(name, positional) for name in op.tensors),
            *(inspect.Parameter(name, positional, default=default) for name, default in op.parameters),
            *(inspect.Parameter(name, by_keyword, default=default) for name, default in op.literals),
        ]
    )


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, torch.nn.Module):
        return f"{type(function).__name__}.forward"
    if is_known(function):
        return describe_callable(function)
    return str(getattr(function, "__name__", type(function).__name__))
