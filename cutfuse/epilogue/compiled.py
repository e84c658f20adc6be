"""Tracing inside torch.compile.

Dynamo runs the user's callable on a stand-in whose every operation is a call that Dynamo evaluates at once and takes
for a constant. What the callable reads from outside is read by Dynamo itself, hence guarded: when a closure, a global
or an attribute changes, the region is compiled again. The graph sees no more than the finished program.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch

from cutfuse.epilogue import calls
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr
from cutfuse.epilogue.fingerprint import remember
from cutfuse.epilogue.symbolic import Symbolic
from cutfuse.epilogue.trace import ONE_SCALAR, Epilogue, check_result, symbolic_arguments

_EXPRESSIONS_LIMIT = 4096

# By name, since only plain constants go through Dynamo. A str, as Dynamo makes a changing int a symbol.
_expressions: dict[str, Expr] = {}
_names = map("n{}".format, itertools.count())


class StandIn(Symbolic):
    """A symbolic value as Dynamo sees it: the name of an expression."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _operate(self, symbol: str, *arguments: Any) -> StandIn:
        return StandIn(_record(symbol, _encode_all(arguments), ()))

    def _call(self, function: Callable[..., Any] | str, arguments: tuple, keywords: dict[str, Any]) -> StandIn:
        named = tuple([(name, _encode(value)) for name, value in keywords.items()])
        return StandIn(_record(function, _encode_all(arguments), named))


def trace(fn: Callable[..., Any], operand_count: int) -> Epilogue:
    """Traced by Dynamo: the Epilogue of a callable, as a constant."""
    result = fn(*[StandIn(name) for name in _start(operand_count)])
    return _finish(result.name if isinstance(result, StandIn) else None, operand_count)


def _encode_all(values: tuple) -> tuple:
    return tuple([_encode(value) for value in values])


def _encode(value: Any) -> Any:
    """As constants. Dynamo may hold a number as a symbol; asking for its digits makes it a guarded constant."""
    if isinstance(value, StandIn):
        return "expression", value.name
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, int):
        return operator.index(value)
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape)
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, content = value
    if kind == "tensor":
        raise EpilogueError(
            f"the epilogue captures a tensor of shape {content}: pass it through operands= and take it as a further "
            "argument of the epilogue, `lambda z, r: ...`"
        )
    return _expressions[content] if kind == "expression" else float.fromhex(content)


def _remember(expression: Expr) -> str:
    name = next(_names)
    remember(_expressions, name, expression, _EXPRESSIONS_LIMIT)
    return name


@torch.compiler.assume_constant_result
def _start(operand_count: int) -> tuple[str, ...]:
    return tuple(_remember(leaf) for leaf in symbolic_arguments(operand_count))


@torch.compiler.assume_constant_result
def _record(function: Callable[..., Any] | str, arguments: tuple, keywords: tuple) -> str:
    given = tuple(map(_decode, arguments))
    if isinstance(function, str) and not function.isidentifier():
        return _remember(calls.operate(function, given))
    return _remember(calls.call(function, given, {name: _decode(value) for name, value in keywords}))


@torch.compiler.assume_constant_result
def _finish(name: str | None, operand_count: int) -> Epilogue:
    if name is None:
        raise EpilogueError(f"the epilogue returns something that does not depend on its arguments: {ONE_SCALAR}")
    return Epilogue.from_expression(check_result(_expressions[name]), operand_count)
