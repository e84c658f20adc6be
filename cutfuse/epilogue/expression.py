"""Expressions: an immutable, hash-consed DAG over the pre-activation z, the tensor operands and numbers."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.symbolic import Symbolic
from cutfuse.epilogue.table import Op, op_table

# Node by structure, so that equal subexpressions are one object. Children are named by identity: a node keeps its
# children alive, hence no key outlives what it names.
_nodes: weakref.WeakValueDictionary[tuple, Expr] = weakref.WeakValueDictionary()

_REPR_LIMIT = 400


class Expr(Symbolic):
    """A node: an op on other nodes, or a leaf, which is `z`, an operand `r0`.. or a number.

    Behaves like a tensor of one element type: Python operators, torch functions and Tensor methods of the epilogue
    language give further expressions. Made by `input()`, `operand(k)` and those.
    """

    __slots__ = ("__weakref__", "arguments", "leaf", "number", "op", "parameters", "reads")

    op: Op | None
    arguments: tuple[Expr, ...]
    parameters: tuple[float, ...]
    leaf: str
    number: float | None
    reads: frozenset[str]  # the leaves other than numbers that it depends on

    @property
    def is_number(self) -> bool:
        return self.number is not None

    @property
    def is_boolean(self) -> bool:
        """Whether PyTorch would give booleans: a comparison, or a logical function."""
        return self.op is not None and self.op.is_boolean

    @property
    def may_be_condition(self) -> bool:
        """A comparison, or an operand, which may be a mask: which type it has is known only when the program runs."""
        return self.is_boolean or self.leaf.startswith("r")

    def _operate(self, symbol: str, *arguments: Any) -> Expr:
        from cutfuse.epilogue import calls

        return calls.operate(symbol, arguments)

    def _call(self, function: Callable[..., Any] | str, arguments: tuple, keywords: dict[str, Any]) -> Expr:
        from cutfuse.epilogue import calls

        return calls.call(function, arguments, keywords)

    def _method(self, name: str) -> Callable[..., Any]:
        from cutfuse.epilogue import calls

        calls.check_method(name)
        return super()._method(name)

    def __repr__(self) -> str:
        text = _infix_text(self, _REPR_LIMIT)
        return text if len(text) <= _REPR_LIMIT else text[: _REPR_LIMIT - 3] + "..."

    def __reduce__(self) -> tuple:
        if self.op is None:
            return _rebuild, (None, (), (), self.leaf, self.number)
        return _rebuild, (self.op.name, self.arguments, self.parameters, "", None)


def _make(key: tuple, **fields: Any) -> Expr:
    found = _nodes.get(key)
    if found is not None:
        return found
    node = object.__new__(Expr)
    for name, value in fields.items():
        setattr(node, name, value)
    return _nodes.setdefault(key, node)


def input() -> Expr:
    """The pre-activation z."""
    return _leaf("z")


def operand(index: int) -> Expr:
    """Tensor operand number `index`, from 0."""
    limit = op_table().limits["operands"]
    if not 0 <= index < limit:
        raise EpilogueError(f"operand {index} of an epilogue: a program has at most {limit} operands, 0 to {limit - 1}")
    return _leaf(f"r{index}")


def _leaf(name: str) -> Expr:
    return _make((name,), op=None, arguments=(), parameters=(), leaf=name, number=None, reads=frozenset({name}))


def constant(value: float) -> Expr:
    """A number as an expression."""
    value = float(value)
    # repr tells -0.0 from 0.0, and gives every nan the same node.
    key = ("number", repr(value))
    return _make(key, op=None, arguments=(), parameters=(), leaf="", number=value, reads=frozenset())


def apply(op: Op, arguments: tuple[Expr, ...], parameters: tuple[float, ...] = ()) -> Expr:
    """The op on expressions. A copy of anything but a boolean is the thing itself."""
    if op is op_table().identity and not arguments[0].is_boolean:
        return arguments[0]
    key = (op.code, *map(id, arguments), *map(repr, parameters))
    reads = frozenset().union(*(argument.reads for argument in arguments))
    return _make(key, op=op, arguments=arguments, parameters=parameters, leaf="", number=None, reads=reads)


def to_expression(value: Any) -> Expr:
    """A symbolic value or a number as an expression. Raises EpilogueError for anything else, tensors among them."""
    if isinstance(value, Expr):
        return value
    return constant(to_number(value, "an argument"))


def to_number(value: Any, what: str) -> float:
    """A Python or numpy number, or a tensor of no dimensions on the CPU that needs no gradient, as a float."""
    if isinstance(value, Expr) and value.is_number:
        return value.number
    if isinstance(value, Symbolic):
        raise EpilogueError(f"{what} has to be a number, got the expression {value!r}")
    if isinstance(value, torch.Tensor):
        return _tensor_to_number(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            raise EpilogueError(f"{what} is an integer beyond the range of floating-point numbers") from None
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and value.dtype.kind in "biuf":
        return float(value.item())
    raise EpilogueError(f"{what} has to be a number or an expression, got {value!r} of type {type(value).__name__}")


def _tensor_to_number(tensor: torch.Tensor) -> float:
    if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad and not tensor.is_complex():
        return float(tensor.item())
    gradient = " that needs a gradient" if tensor.requires_grad else ""
    raise EpilogueError(
        f"the epilogue captures a tensor of shape {tuple(tensor.shape)} on {tensor.device}{gradient}: pass it through "
        "operands= and take it as a further argument of the epilogue, `lambda z, r: ...`"
    )


def topological(root: Expr) -> Iterator[Expr]:
    """Every node below and including root, arguments before their users. Iterative: a chain may be long."""
    seen: set[int] = set()
    stack = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((argument, False) for argument in reversed(node.arguments))


def _infix_text(node: Expr, budget: int) -> str:
    if node.op is None:
        return node.leaf or f"{node.number:.12g}"
    if budget <= 0:
        return "..."
    parts = [_infix_text(argument, (budget - 8) // len(node.arguments)) for argument in node.arguments]
    if node.op.infix:
        return f"({parts[0]} {node.op.infix} {parts[1]})"
    if node.op.prefix and node.op is not op_table().identity:
        return f"{node.op.prefix}{parts[0]}"
    named = zip(node.op.parameters, node.parameters, strict=True)
    keywords = [f"{name}={value:.12g}" for (name, default), value in named if value != default]
    return f"{node.op.name}({', '.join(parts + keywords)})"


def _rebuild(op: str | None, arguments: tuple, parameters: tuple, leaf: str, number: float | None) -> Expr:
    if op is not None:
        return apply(op_table().op(op), arguments, parameters)
    return _leaf(leaf) if number is None else constant(number)
