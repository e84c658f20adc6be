"""An expression that was traced ahead of time, for operands whose types are known now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cutfuse.epilogue import calls
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, input, operand, to_expression, topological
from cutfuse.epilogue.table import Op, op_table
from cutfuse.epilogue.types import ValueTypes, input_types, under_autocast


def retype(root: Expr, types: ValueTypes, numbers: Sequence[int | float | None] | None = None) -> Expr:
    """The expression with z and the operands of these types: each function is called again, as in the user's callable.

    numbers: for each operand of the expression the number that replaces it, or None. `types` has those of z and of the
    operands that are not replaced.

    Raises EpilogueError where PyTorch refuses a type, or computes with integers.
    """
    with under_autocast(types):
        return _retype(root, input_types(types), [None] * (len(types) - 1) if numbers is None else numbers)


def _retype(root: Expr, types: ValueTypes, numbers: Sequence[int | float | None]) -> Expr:
    identity = op_table().identity
    leaves = _leaves(types, numbers)
    places: dict[int, Expr] = {}
    for node in topological(root, _called_with):
        arguments = tuple(places[id(argument)] for argument in _called_with(node))
        if node.call is not None:
            call = node.call.map(lambda item: places[id(item)] if isinstance(item, Expr) else item)
            found = calls.call(call.function, call.arguments, dict(call.keywords))
        elif node.leaf:
            found = leaves[node.leaf]
        elif node.op is None:
            found = calls.call(torch.full_like, (leaves[node.type.like], node.number), {}) if node.type.like else node
        elif node.op is identity:
            found = _cast(node, arguments[0], types)
        else:
            found = calls.call(node.op.function, arguments, _keywords(node.op, node.parameters, arguments))
        places[id(node)] = found
    return places[id(root)]


def _called_with(node: Expr) -> tuple[Expr, ...]:
    return node.arguments if node.call is None else node.call.inputs


def _keywords(op: Op, parameters: tuple[float, ...], arguments: tuple[Expr, ...]) -> dict[str, Any]:
    """The parameters and literals of a call.

    Whether the user wrote 1 or 1.0 is not known any more. Beside integers it is taken for 1, as clamp then is one of
    integers, which are refused.
    """
    is_exact = all(item.type.is_integer or item.is_boolean for item in arguments)
    values = [int(value) if is_exact and value.is_integer() else value for value in parameters]
    return dict(op.keywords(values))


def _leaves(types: ValueTypes, numbers: Sequence[int | float | None]) -> dict[str, Expr]:
    leaves = {"z": input(types[0])}
    remaining = enumerate(types[1:])
    for index, number in enumerate(numbers):
        leaves[f"r{index}"] = operand(*next(remaining)) if number is None else to_expression(number)
    return leaves


def _cast(node: Expr, argument: Expr, types: ValueTypes) -> Expr:
    """An identity node, which marks a value as one of a type: of a mask as boolean, of a cast as the cast's."""
    if node.is_boolean and not argument.is_boolean:
        raise EpilogueError(
            f"the epilogue takes {argument!r} as a mask, which is torch.bool, but it is {argument.type.dtype}: pass "
            "operand != 0"
        )
    dtype = types[0].dtype if node.type.dtype is None else node.type.dtype
    return argument if node.is_boolean else calls.call(torch.Tensor.to, (argument, dtype), {})
