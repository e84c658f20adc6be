"""Expressions: an immutable, hash-consed DAG over the pre-activation z, the tensor operands and numbers."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch

from cutfuse.epilogue.errors import (
    NEEDS_VALUES,
    EpilogueError,
    refusal,
    refuse_attribute,
    refuse_augmented,
    refuse_list,
)
from cutfuse.epilogue.table import Op, describe_callable, find_attribute, op_table
from cutfuse.epilogue.types import (
    BOOLEAN,
    INPUT_DTYPE,
    INPUTS,
    NUMBERS,
    UNKNOWN,
    InputDtype,
    ValueType,
    refuse_unknown_type,
    type_of,
)

# Node by structure, so that equal subexpressions are one object. Children are named by identity: a node keeps its
# children alive, hence no key outlives what it names.
_nodes: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()

_REPR_LIMIT = 400


class Call(NamedTuple):
    """A call of a torch function, with expressions and constants."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    @property
    def inputs(self) -> tuple[Expr, ...]:
        return tuple(item for item in (*self.arguments, *dict(self.keywords).values()) if isinstance(item, Expr))

    def map(self, replaced: Callable[[Any], Any]) -> Call:
        """The same call of other values."""
        keywords = tuple((name, replaced(item)) for name, item in self.keywords)
        return Call(self.function, tuple(map(replaced, self.arguments)), keywords)


def _operator(symbol: str) -> Callable[[Any, Any], Any]:
    def operator(self: Expr, other: Any) -> Any:
        return self._operate(symbol, self, other)

    return operator


def _infix(symbol: str) -> tuple[Callable[[Any, Any], Any], ...]:
    """The operator with a value on the left, with one on the right, and in place."""

    def reflected(self: Expr, other: Any) -> Any:
        return self._operate(symbol, other, self)

    def in_place(self: Expr, other: Any) -> NoReturn:
        refuse_augmented(symbol)

    return _operator(symbol), reflected, in_place


def _prefix(symbol: str) -> Callable[[Any], Any]:
    def operator(self: Expr) -> Any:
        return self._operate(symbol, self)

    return operator


class Expr:
    """A node: an op on other nodes, or a leaf, which is `z`, an operand `r0`.. or a number.

    Behaves like a tensor of one element type: Python operators, torch functions and Tensor methods of the epilogue
    language give further expressions. Made by `input()`, `operand(k)` and those.
    """

    __slots__ = ("__weakref__", "arguments", "call", "leaf", "number", "op", "parameters", "reads", "type")

    op: Op | None
    arguments: tuple[Expr, ...]
    parameters: tuple[float, ...]
    leaf: str
    number: float | None
    reads: frozenset[str]  # the leaves other than numbers that it depends on
    type: ValueType  # what PyTorch would give
    call: Call | None  # of an identity node: the call of the user's callable that its argument spells

    __array_ufunc__ = None  # a numpy scalar on the left then leaves the operator to us
    __hash__ = object.__hash__

    __add__, __radd__, __iadd__ = _infix("+")
    __sub__, __rsub__, __isub__ = _infix("-")
    __mul__, __rmul__, __imul__ = _infix("*")
    __truediv__, __rtruediv__, __itruediv__ = _infix("/")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _infix("//")
    __mod__, __rmod__, __imod__ = _infix("%")
    __pow__, __rpow__, __ipow__ = _infix("**")
    __and__, __rand__, __iand__ = _infix("&")
    __or__, __ror__, __ior__ = _infix("|")
    __xor__, __rxor__, __ixor__ = _infix("^")
    __matmul__, __rmatmul__, __imatmul__ = _infix("@")
    __lshift__, __rlshift__, __ilshift__ = _infix("<<")
    __rshift__, __rrshift__, __irshift__ = _infix(">>")
    __lt__ = _operator("<")
    __le__ = _operator("<=")
    __eq__ = _operator("==")
    __ne__ = _operator("!=")
    __gt__ = _operator(">")
    __ge__ = _operator(">=")
    __neg__ = _prefix("-")
    __pos__ = _prefix("+")
    __invert__ = _prefix("~")

    @property
    def is_number(self) -> bool:
        return self.number is not None

    @property
    def is_boolean(self) -> bool:
        """Whether PyTorch would give booleans: a comparison, a logical function, or a mask that is an operand."""
        return self.type.is_boolean

    @property
    def may_be_condition(self) -> bool:
        """A boolean value, or an operand of a type that is not known yet."""
        return self.is_boolean or (self.leaf.startswith("r") and self.type.dtype is None)

    def _operate(self, symbol: str, *arguments: Any) -> Expr:
        from cutfuse.epilogue import calls

        return calls.operate(symbol, arguments)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Expr:
        from cutfuse.epilogue import calls

        return calls.call(function, arguments, keywords)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, cls):
                return argument._call(function, args, kwargs or {})
        return refuse_list(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch.Tensor, name, None)
        if name.startswith("__") or function is None:
            raise AttributeError(f"a symbolic value of an epilogue has no {name!r}, and neither has torch.Tensor")
        if not callable(function):
            refuse_attribute(name)

        def method(*arguments: Any, **keywords: Any) -> Any:
            return self._call(function, (self, *arguments), keywords)

        return method

    def __abs__(self) -> Any:
        return self._call(torch.abs, (self,), {})

    @property
    def dtype(self) -> torch.dtype | InputDtype:
        """The type that PyTorch would give: the arithmetic is fp32, or fp64 for fp64, all the same."""
        if self.type.dtype is None:
            return INPUT_DTYPE if self.type == INPUTS else refuse_unknown_type()
        return self.type.dtype

    def __repr__(self) -> str:
        text = _infix_text(self, _REPR_LIMIT)
        return text if len(text) <= _REPR_LIMIT else text[: _REPR_LIMIT - 3] + "..."

    def __reduce__(self) -> tuple[Any, ...]:
        """All nodes in one list, as pickle and deepcopy would recurse into arguments, and a chain may be long."""
        places: dict[int, int] = {}
        records: list[tuple[Any, ...]] = []
        for node in topological(self, lambda node: (*node.arguments, *(node.call.inputs if node.call else ()))):
            places[id(node)] = len(records)
            arguments = tuple(places[id(argument)] for argument in node.arguments)
            name = None if node.op is None else node.op.name
            call = None if node.call is None else _name_call(node.call, places)
            records.append((name, arguments, node.parameters, node.leaf, node.number, node.type, call))
        return _rebuild, (tuple(records),)


for _name, _reason in NEEDS_VALUES.items():
    setattr(Expr, _name, refusal(_reason))


def _make(
    key: tuple[Any, ...],
    type: ValueType,
    op: Op | None = None,
    arguments: tuple[Expr, ...] = (),
    parameters: tuple[float, ...] = (),
    leaf: str = "",
    number: float | None = None,
    call: Call | None = None,
) -> Expr:
    found = _nodes.get(key)
    if found is not None:
        return found
    node = object.__new__(Expr)
    node.op = op
    node.arguments = arguments
    node.parameters = parameters
    node.leaf = leaf
    node.number = number
    node.reads = frozenset({leaf} if leaf else ()).union(*[argument.reads for argument in arguments])
    node.type = type
    node.call = call
    return _nodes.setdefault(key, node)


def input(type: ValueType = INPUTS) -> Expr:
    """The pre-activation z."""
    return _leaf("z", type)


def operand(index: int, type: ValueType = UNKNOWN) -> Expr:
    """Tensor operand number `index`, from 0."""
    limit = op_table().limits["operands"]
    if not 0 <= index < limit:
        raise EpilogueError(f"operand {index} of an epilogue: a program has at most {limit} operands, 0 to {limit - 1}")
    return _leaf(f"r{index}", type)


def unlimited_operand(index: int, type: ValueType) -> Expr:
    """The same beyond a program's limit, for an expression of which a part is to become a program."""
    return _leaf(f"r{index}", type)


def _leaf(name: str, type: ValueType) -> Expr:
    return _make((name, type), type, leaf=name)


def constant(value: float, type: ValueType = NUMBERS[float]) -> Expr:
    """A number as an expression. `type`: what it was, as that decides how PyTorch promotes it."""
    value = float(value)
    # repr tells -0.0 from 0.0, and gives every nan the same node.
    return _make(("number", repr(value), type), type, number=value)


def apply(
    op: Op, arguments: tuple[Expr, ...], parameters: tuple[float, ...] = (), type: ValueType | None = None
) -> Expr:
    """The op on expressions. Without a type the result is boolean where PyTorch's is for floats, else not known."""
    if type is None:
        type = BOOLEAN if op.is_boolean else arguments[0].type if op is op_table().identity else UNKNOWN
    if op is op_table().identity and (type.promotes_as(arguments[0].type) or arguments[0].is_number):
        return arguments[0]
    key = (op.code, type, *map(id, arguments), *map(repr, parameters))
    return _make(key, type, op, arguments, parameters)


def with_type(node: Expr, type: ValueType) -> Expr:
    """The same value marked as one of a type, unless that is UNKNOWN.

    Where it had another type, the mark is an identity node, which lowering removes.
    """
    if type == UNKNOWN or type.promotes_as(node.type) or node.is_number:
        return node
    if node.op is not None and node.type == UNKNOWN:
        return apply(node.op, node.arguments, node.parameters, type)
    return apply(op_table().identity, (node,), (), type)


def with_call(node: Expr, call: Call) -> Expr:
    """The same value marked as the result of a call, by an identity node, which lowering removes."""
    op = op_table().identity
    # repr tells 1 from 1.0 and -0.0 from 0.0
    key = (op.code, node.type, id(node), *call.map(lambda item: id(item) if isinstance(item, Expr) else repr(item)))
    return _make(key, node.type, op, (node,), call=call)


def unmarked(node: Expr) -> Expr:
    """A value without the identity nodes that mark its type or a call."""
    while node.op is op_table().identity:
        (node,) = node.arguments
    return node


def to_expression(value: Any) -> Expr:
    """A symbolic value or a number as an expression. Raises EpilogueError for anything else, tensors among them."""
    if isinstance(value, Expr):
        return value
    number = to_number(value, "an argument")
    if isinstance(value, torch.Tensor):
        return constant(number, type_of(value))
    kind = bool if isinstance(value, bool) else int if isinstance(value, numbers.Integral) else float
    return constant(number, NUMBERS[kind])


def to_symbolic(value: Any) -> Any:
    """`to_expression`, for arguments of PyTorch's functions: their annotations take nothing but tensors."""
    return to_expression(value)


def to_number(value: Any, what: str) -> float:
    """A Python or numpy number, or a tensor of no dimensions on the CPU that needs no gradient, as a float."""
    if isinstance(value, Expr) and value.number is not None:
        return value.number
    if isinstance(value, Expr):
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
    kind = type(value).__name__
    hint = "; an epilogue computes with real numbers" if isinstance(value, complex) else ""
    raise EpilogueError(f"{what} has to be a number or an expression, got {value!r} of type {kind}{hint}")


def _tensor_to_number(tensor: torch.Tensor) -> float:
    batched = torch._C._functorch.is_batchedtensor(tensor)
    is_plain = not (batched or tensor.requires_grad or tensor.is_complex())
    if tensor.dim() == 0 and tensor.device.type == "cpu" and is_plain:
        return float(tensor.item())
    if tensor.is_complex():
        raise EpilogueError(f"the epilogue captures a complex tensor ({tensor.dtype}), and computes with real numbers")
    use = " that torch.vmap maps over" if batched else " that needs a gradient" if tensor.requires_grad else ""
    return refuse_captured(f"of shape {tuple(tensor.shape)} on {tensor.device}{use}")


def refuse_captured(description: str) -> NoReturn:
    raise EpilogueError(
        f"the epilogue captures a tensor {description}: pass it through operands= and take it as a further argument of "
        "the epilogue, `lambda z, r: ...`"
    )


def topological(
    root: Expr, arguments_of: Callable[[Expr], tuple[Expr, ...]] = attrgetter("arguments")
) -> Iterator[Expr]:
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
            stack.extend((argument, False) for argument in reversed(arguments_of(node)))


def _infix_text(node: Expr, budget: int) -> str:
    if node.op is None:
        return node.leaf or f"{node.number:.12g}"
    if budget <= 0:
        return "..."
    if node.call is not None:
        return _infix_text(node.arguments[0], budget)
    parts = [_infix_text(argument, (budget - 8) // len(node.arguments)) for argument in node.arguments]
    if node.op.infix:
        return f"({parts[0]} {node.op.infix} {parts[1]})"
    if node.op.prefix and node.op is not op_table().identity:
        return f"{node.op.prefix}{parts[0]}"
    named = zip(node.op.parameters, node.parameters, strict=True)
    keywords = [f"{name}={value:.12g}" for (name, default), value in named if value != default]
    return f"{node.op.name}({', '.join(parts + keywords)})"


class _Place(NamedTuple):
    """Where an expression stands among a pickle's records."""

    number: int


def _name_call(call: Call, places: dict[int, int]) -> Call | None:
    """The call for a pickle, with its function's path; None where that has none."""
    op = next(iter(op_table().callables.get(call.function, ())), None)
    paths = (describe_callable(call.function), *([op.path] if op else []))
    path = next((path for path in paths if find_attribute(path) is not None), None)
    placed = call.map(lambda item: _Place(places[id(item)]) if isinstance(item, Expr) else item)
    return None if path is None else placed._replace(function=path)  # type: ignore[arg-type]  # a path, in a pickle


def _rebuild(records: tuple[tuple[Any, ...], ...]) -> Expr:
    nodes: list[Expr] = []
    for op, arguments, parameters, leaf, number, type, call in records:
        if call is not None:
            found = call.map(lambda item: nodes[item.number] if isinstance(item, _Place) else item)
            nodes.append(with_call(nodes[arguments[0]], found._replace(function=find_attribute(found.function))))
        elif op is not None:
            nodes.append(apply(op_table().op(op), tuple(nodes[place] for place in arguments), parameters, type))
        else:
            nodes.append(_leaf(leaf, type) if number is None else constant(number, type))
    return nodes[-1]
