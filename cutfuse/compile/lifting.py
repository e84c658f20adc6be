"""From a node of Dynamo's graph to an expression of the epilogue language.

The language decides what a node means: every call goes where the calls of a traced epilogue go, so that the op table
stays the only list of ops.

Activations that a model writes out, as in `0.5 * x * (1 + erf(x / sqrt(2)))`, become one op each. They are written in
many ways, so they are recognised by their values and not by their form: an expression of one value that equals an op's
on a grid in fp64, and where fp32 may overflow, is that op. An instruction of the interpreter takes as long for an op as
for an addition, so that eight instructions become one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..epilogue.calls import is_known
from ..epilogue.compositions import cast, prelu
from ..epilogue.errors import EpilogueError
from ..epilogue.expression import Expr, apply, to_expression, topological, with_type
from ..epilogue.lower import check_length
from ..epilogue.program import arithmetic_dtype
from ..epilogue.table import CONDITION, Op, describe_callable, op_table
from ..epilogue.traced_tensor import evaluate_call, is_operator
from ..epilogue.types import ValueType, type_of
from .nodes import (
    DROPOUTS,
    example_of,
    function_of,
    is_evaluated_norm,
    name_of,
    named_arguments,
    tensor_of,
)
from .products import same, same_shape

_REASON_LENGTH = 160
_REFUSED = "is not in the epilogue language"
# What gives its argument's values, in evaluation or where no gradient is needed.
COPIES = DROPOUTS | {"contiguous", "clone", "detach"}
# Views of rows: they keep the last dimension, hence the matrix.
ROW_VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
PERMUTATIONS = {"permute", "transpose", "t", "swapaxes", "swapdims", "movedim", "moveaxis"}
# The two rows that a batch norm in evaluation comes to: z * scale + shift.
NORM_SCALE, NORM_SHIFT = "scale", "shift"


class StopError(Exception):
    """A region ends before a node; the message says why."""


class Operand(NamedTuple):
    """A value outside of a region that its epilogue reads.

    part: of a batch norm's node, which of its two rows. axes: where it is read behind a permutation, the dimensions of
    the product in the order that they have there.
    """

    source: fx.Node
    part: str = ""
    axes: tuple[int, ...] = ()

    @property
    def type(self) -> ValueType:
        example = example_of(self.source)
        return ValueType(arithmetic_dtype(example)) if self.part else type_of(example)

    @property
    def is_matrix(self) -> bool:
        """Whether it has more than one dimension, so that its shape is one of a view of the product."""
        example = tensor_of(self.source)
        return not self.part and example is not None and example.dim() > (0 if self.axes else 1)


def lift(node: fx.Node, values: Callable[[fx.Node], Any], operand: Callable[[Operand], Expr]) -> Expr:
    """What a node computes. `values`: the expression or number of an argument. Raises StopError."""
    example = tensor_of(node)
    if example is None:
        raise StopError(f"{name_of(node)} gives no tensor")
    try:
        found = _evaluate(node, values, operand)
        if not isinstance(found, Expr):
            raise StopError(f"{name_of(node)} gives no expression")
        if found.type.dtype != example.dtype:  # autocast computes some functions in other types than their arguments'
            found = cast(found, example.dtype)
        check_length(found)
    except EpilogueError as error:
        raise StopError(short_reason(error)) from None
    return found


def short_reason(error: Exception) -> str:
    """What is refused, without the advice to a user who wrote an epilogue."""
    line = str(error).split("\n")[0]
    if _REFUSED in line:
        return line.partition(_REFUSED)[0] + _REFUSED
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 3] + "..."


def _evaluate(node: fx.Node, values: Callable[[fx.Node], Any], operand: Callable[[Operand], Expr]) -> Any:
    name = name_of(node)
    if name in DROPOUTS and is_evaluated_dropout(node):
        return values(_first(node))
    if name == "detach":
        return values(_without_gradient(node))
    if name == "batch_norm":
        return _evaluate_norm(node, values, operand)
    if name == "prelu":
        return _evaluate_prelu(node, values)
    function = function_of(node)
    if function is None:
        raise StopError(f"{name} {_REFUSED}")
    try:
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), values)
    except StopError:
        if is_operator(function) or is_known(function):
            raise
        raise StopError(f"{describe_callable(function)} {_REFUSED}") from None  # whose weight is no operand
    if name == "contiguous":
        keywords = {}  # the layout of the result is compared in the end
    return evaluate_call(function, tuple(arguments), dict(keywords))


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(first, fx.Node):
        raise StopError(f"{name_of(node)} has no tensor as its first argument")
    return first


def is_evaluated_dropout(node: fx.Node) -> bool:
    flag = "train" if isinstance(node.target, str) or node.target is torch.dropout else "training"
    return named_arguments(node, ("input", "p", flag)).get(flag, True) is False


def _without_gradient(node: fx.Node) -> fx.Node:
    first = _first(node)
    example = tensor_of(first)
    if example is None or example.requires_grad:
        raise StopError("detach cuts the gradient")
    return first


def _evaluate_norm(node: fx.Node, values: Callable[[fx.Node], Any], operand: Callable[[Operand], Expr]) -> Expr:
    example = tensor_of(node)
    if node.target is not F.batch_norm:
        raise StopError("torch.batch_norm takes its arguments in another order than torch.nn.functional.batch_norm")
    if not is_evaluated_norm(node):
        raise StopError("batch_norm in training takes statistics of all rows")
    if example is None or example.dim() != 2:
        raise StopError("batch_norm of more than two dimensions does not normalise the last one")
    found: Expr = values(_first(node)) * operand(Operand(node, NORM_SCALE)) + operand(Operand(node, NORM_SHIFT))
    return found


def _evaluate_prelu(node: fx.Node, values: Callable[[fx.Node], Any]) -> Expr:
    """With one slope, or one for each column: the language takes slopes for values without dimensions alone."""
    named = named_arguments(node, ("input", "weight"))
    source, slopes = example_of(named["input"]), example_of(named["weight"])
    if source.dim() != 2 and not same(slopes.numel(), 1):
        raise StopError("prelu has a slope for each index of dimension 1, which are no columns of the product")
    return with_type(to_expression(prelu(values(named["input"]), values(named["weight"]))), type_of(example_of(node)))


def is_row_view(node: fx.Node) -> bool:
    """Whether a node is a view that keeps the last dimension, hence the rows and their order."""
    if name_of(node) not in ROW_VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.kwargs and name_of(node) in ("view", "reshape"):
        return False
    source, example = tensor_of(node.args[0]), tensor_of(node)
    if source is None or example is None or min(source.dim(), example.dim()) < 1 or source.dtype != example.dtype:
        return False
    if source.requires_grad != example.requires_grad:  # z.view(z.dtype) has no gradient
        return False
    return same(source.shape[-1], example.shape[-1])


def is_row_slice(node: fx.Node) -> bool:
    """Whether a node takes some of the rows, by integers and slices, as models do to shift logits: `z[..., :-1, :]`."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    source, example = tensor_of(node.args[0]), tensor_of(node)
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if source is None or example is None or example.dim() < 1:
        return False
    if not all(item is Ellipsis or type(item) in (int, slice) for item in index):
        return False
    takes_last = len(index) == source.dim() or (Ellipsis in index and index[-1] is not Ellipsis)
    return not takes_last or index[-1] == slice(None)


def permutation_of(node: fx.Node) -> tuple[int, ...] | None:
    """The order in which a node puts the dimensions of its argument; None if it is no permutation."""
    source = tensor_of(node.args[0]) if node.args else None
    given = (*node.args[1:], *node.kwargs.values())
    if name_of(node) not in PERMUTATIONS or source is None or any(isinstance(item, fx.Node) for item in given):
        return None
    strides = [2**place for place in range(source.dim())]
    probe = torch.empty_strided([2] * source.dim(), strides, device="meta")
    permuted: torch.Tensor = getattr(torch.Tensor, name_of(node))(probe, *node.args[1:], **node.kwargs)
    return tuple(strides.index(stride) for stride in permuted.stride())


def inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes another."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of a shape is known to broadcast into the target's."""
    if len(shape) > len(target):
        return False
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return all(same(size, 1) or same(size, other) for size, other in pairs)


def check_operand(source: fx.Node, shape: torch.Size, device: torch.device) -> None:
    """Raises StopError for a value that a program over a matrix of that shape cannot read."""
    example = tensor_of(source)
    if example is None:
        raise StopError(f"{source.name} is a number that is not known at compile time")
    if example.is_complex() or example.is_quantized or example.layout is not torch.strided or example.is_nested:
        raise StopError(f"{source.name} is of {example.dtype} and {example.layout}")
    if example.device != device:
        raise StopError(f"{source.name} is on {example.device}")
    if not broadcasts(example.shape, shape):
        raise StopError(f"{source.name} of shape {tuple(example.shape)} does not broadcast into {tuple(shape)}")


def check_shape(node: fx.Node, argument: fx.Node) -> None:
    """Raises StopError where a node's result has another shape than its argument."""
    example, source = tensor_of(node), tensor_of(argument)
    if example is None or source is None or not same_shape(example.shape, source.shape):
        raise StopError(f"{name_of(node)} gives another shape, of which a row is no row of the product")


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
