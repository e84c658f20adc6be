"""Finds activations that a model writes out, as in `0.5 * x * (1 + erf(x / sqrt(2)))`, and makes them one op each.

They are written in many ways, so they are recognised by their values and not by their form: an expression of one value
that equals an op's on a grid in fp64, and where fp32 may overflow, is that op. An instruction of the interpreter takes
as long for an op as for an addition, so that eight instructions become one.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..epilogue.expression import Expr, apply, topological
from ..epilogue.table import CONDITION, Op, op_table

_NAMES = ("gelu", "gelu_tanh", "silu", "mish")
_LAST_OPS = ("mul", "div")  # what computes the value of each, however it is written
_LARGEST = 16  # ops of a written form
_TOLERANCE = 1e-6  # constants are written with seven digits and more


def recognise(root: Expr) -> Expr:
    """The expression with one op in the place of each activation that is written out."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _recognise(root)


def _recognise(root: Expr) -> Expr:
    found: dict[int, Expr] = {}
    for node in topological(root):
        if node.op is None or node.call is not None:
            found[id(node)] = node
            continue
        arguments = tuple(found[id(argument)] for argument in node.arguments)
        is_same = all(new is old for new, old in zip(arguments, node.arguments, strict=True))
        rebuilt = node if is_same else apply(node.op, arguments, node.parameters, node.type)
        activation = _activation(rebuilt)
        found[id(node)] = rebuilt if activation is None else activation
    return found[id(root)]


def _activation(node: Expr) -> Expr | None:
    """The activation that a node is, as one op of another node; None if it is none."""
    if node.op is None or node.op.name not in _LAST_OPS or not node.reads:
        return None
    below = [item for item in topological(node) if item is not node and item.reads]
    for value in below:  # from the leaves on, so that the longest written form comes first
        if value.type.dtype != node.type.dtype or not _depends_only(node, value):
            continue
        actual = _values(node, value, _grid())
        if actual is None:
            continue
        for op, expected in _expected():
            if torch.allclose(actual, expected, rtol=_TOLERANCE, atol=_TOLERANCE) and _agrees_far_out(node, value, op):
                return apply(op, (value,), (), node.type)
    return None


def _depends_only(node: Expr, value: Expr) -> bool:
    """Whether a node of few ops is a function of one value below it."""
    between = _between(node, value)
    leaves = [item for item in between if item.op is None and not item.is_number]
    return not leaves and 1 < sum(item.op is not None for item in between) <= _LARGEST


def _between(node: Expr, value: Expr) -> list[Expr]:
    """The nodes that compute a node from a value, in order, without the value."""
    items = topological(node, lambda item: () if item is value else item.arguments)
    return [item for item in items if item is not value]


def _values(node: Expr, value: Expr, x: Tensor) -> Tensor | None:
    """What a node is where a value below it is x; None where it is no smooth function of that."""
    values = {id(value): x}
    for item in _between(node, value):
        if item.op is None:
            values[id(item)] = torch.full_like(x, float(item.number or 0.0))
        elif item.op.is_boolean or CONDITION in item.op.tensors:
            return None
        else:
            values[id(item)] = item.op.compose([values[id(a)] for a in item.arguments], item.parameters)
    return values[id(node)]


def _agrees_far_out(node: Expr, value: Expr, op: Op) -> bool:
    """Whether both are the same in fp32 where a written form could overflow."""
    far = torch.tensor([-1e20, -1e6, -200.0, -90.0, 90.0, 200.0, 1e6, 1e20], dtype=torch.float32, device="cpu")
    actual = _values(node, value, far)
    return actual is not None and torch.allclose(actual, op.compose([far], ()), rtol=1e-3, atol=1e-3, equal_nan=True)


@functools.lru_cache(maxsize=1)
def _grid() -> Tensor:
    return torch.linspace(-12, 12, 193, dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=1)
def _expected() -> tuple[tuple[Op, Tensor], ...]:
    ops = [op_table().op(name) for name in _NAMES]
    return tuple((op, op.compose([_grid()], [default for _, default in op.parameters])) for op in ops)
