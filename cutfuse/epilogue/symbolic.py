"""Operators, torch functions and methods of `Expr`, and the words for what a symbolic value refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from cutfuse.epilogue.errors import EpilogueError

# Python's spelling of each operator: the language, not the list of ops. What a symbol computes is for the op table.
INFIX = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "truediv",
    "**": "pow",
    "&": "and",
    "|": "or",
    "^": "xor",
    "//": "floordiv",
    "%": "mod",
    "@": "matmul",
    "<<": "lshift",
    ">>": "rshift",
}
COMPARISONS = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
PREFIX = {"-": "neg", "+": "pos", "~": "invert"}
# Operators that PyTorch has for booleans but not for floats.
LOGICAL = {"&", "|", "^", "~"}

NO_NUMBER = (
    "the epilogue is traced once, on a symbolic value that has no number: float(), int(), .item(), f-strings "
    "and functions of math and numpy cannot take it; use the torch function of the same name"
)
NO_BRANCH = (
    "the epilogue branches on data (if, while, and, or, not, min, max or a chained comparison of a symbolic value), "
    "but it is traced once for all elements; use torch.where(condition, a, b), torch.minimum, torch.maximum, and &, | "
    "and ~ between comparisons"
)
NO_BUILTIN = (
    "the epilogue gives round() or divmod() a symbolic value, and PyTorch has neither for tensors; use torch.round(z), "
    "or torch.div(z, d, rounding_mode='floor') and torch.remainder(z, d)"
)
NO_SEQUENCE = (
    "the epilogue indexes, iterates over or takes the length of a symbolic value, which stands for every element "
    "alike; pass other tensors through operands=, already sliced"
)
# Python's conversions of a tensor and what else needs its elements, by the method that PyTorch calls.
NEEDS_VALUES = {
    **dict.fromkeys(("__bool__", "is_nonzero"), NO_BRANCH),
    **dict.fromkeys(("__round__", "__divmod__", "__rdivmod__"), NO_BUILTIN),
    **dict.fromkeys(("__len__", "__iter__", "__getitem__", "__setitem__", "__contains__", "unbind"), NO_SEQUENCE),
    **dict.fromkeys(
        ("__float__", "__int__", "__index__", "__complex__", "__array__", "item", "tolist", "numpy", "__format__"),
        NO_NUMBER,
    ),
}
# Methods that tell how a tensor lies in memory.
LAYOUT_METHODS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "stride",
        "storage_offset",
        "is_contiguous",
        "get_device",
        "element_size",
        "data_ptr",
        "storage",
        "untyped_storage",
    ]
)


class Symbolic:
    """Operators and torch functions on a symbolic value. A subclass computes them, in `_operate` and `_call`."""

    if TYPE_CHECKING:  # set by the loops below

        def __add__(self, other: Any) -> Any: ...
        def __radd__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __rsub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __rmul__(self, other: Any) -> Any: ...
        def __truediv__(self, other: Any) -> Any: ...
        def __rtruediv__(self, other: Any) -> Any: ...
        def __floordiv__(self, other: Any) -> Any: ...
        def __rfloordiv__(self, other: Any) -> Any: ...
        def __mod__(self, other: Any) -> Any: ...
        def __rmod__(self, other: Any) -> Any: ...
        def __pow__(self, other: Any) -> Any: ...
        def __rpow__(self, other: Any) -> Any: ...
        def __and__(self, other: Any) -> Any: ...
        def __rand__(self, other: Any) -> Any: ...
        def __or__(self, other: Any) -> Any: ...
        def __ror__(self, other: Any) -> Any: ...
        def __xor__(self, other: Any) -> Any: ...
        def __rxor__(self, other: Any) -> Any: ...
        def __lt__(self, other: Any) -> Any: ...
        def __le__(self, other: Any) -> Any: ...
        def __gt__(self, other: Any) -> Any: ...
        def __ge__(self, other: Any) -> Any: ...
        def __eq__(self, other: object) -> Any: ...
        def __ne__(self, other: object) -> Any: ...
        def __neg__(self) -> Any: ...
        def __pos__(self) -> Any: ...
        def __invert__(self) -> Any: ...

    __slots__ = ()
    __array_ufunc__ = None  # a numpy scalar on the left then leaves the operator to us
    __hash__ = object.__hash__

    def _operate(self, symbol: str, *arguments: Any) -> Any:
        raise NotImplementedError

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        raise NotImplementedError

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


def refuse_list(function: str) -> NoReturn:
    raise EpilogueError(f"{function} of a list of values is not in the epilogue language: apply it after the call")


def refuse_augmented(symbol: str) -> NoReturn:
    raise EpilogueError(f"the epilogue changes a value in place with {symbol}=; write z = z {symbol} ... instead")


def _refusal(reason: str) -> Callable[..., NoReturn]:
    def refuse(self: Symbolic, *_: Any, **__: Any) -> NoReturn:
        raise EpilogueError(reason)

    return refuse


def _infix(symbol: str) -> Callable[[Any, Any], Any]:
    def operator(self: Symbolic, other: Any) -> Any:
        return self._operate(symbol, self, other)

    return operator


def _reflected(symbol: str) -> Callable[[Any, Any], Any]:
    def operator(self: Symbolic, other: Any) -> Any:
        return self._operate(symbol, other, self)

    return operator


def _in_place(symbol: str) -> Callable[[Any, Any], Any]:
    def operator(self: Symbolic, other: Any) -> NoReturn:
        refuse_augmented(symbol)

    return operator


def _prefix(symbol: str) -> Callable[[Any], Any]:
    def operator(self: Symbolic) -> Any:
        return self._operate(symbol, self)

    return operator


for _name, _reason in NEEDS_VALUES.items():
    setattr(Symbolic, _name, _refusal(_reason))
for _symbol, _name in INFIX.items():
    setattr(Symbolic, f"__{_name}__", _infix(_symbol))
    setattr(Symbolic, f"__r{_name}__", _reflected(_symbol))
    setattr(Symbolic, f"__i{_name}__", _in_place(_symbol))
for _symbol, _name in COMPARISONS.items():
    setattr(Symbolic, f"__{_name}__", _infix(_symbol))
for _symbol, _name in PREFIX.items():
    setattr(Symbolic, f"__{_name}__", _prefix(_symbol))


def refuse_attribute(name: str) -> NoReturn:
    """For an attribute of Tensor that says how a tensor lies in memory, where, or of what shape it is."""
    raise EpilogueError(
        f"the epilogue reads Tensor.{name} of a symbolic value, which stands for one element: it has a dtype, but no "
        "shape, device or memory. Take what depends on these from the tensors themselves, outside of the epilogue"
    )
