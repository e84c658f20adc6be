"""The Python face of a symbolic value: operators, torch functions, methods, and what it refuses.

Two classes share it: `Expr`, and the stand-in for it under torch.compile. Each says in `_call` and `_operate` what a
call or an operator gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from cutfuse.epilogue.errors import EpilogueError, UnknownMethodError

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
}
COMPARISONS = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
PREFIX = {"-": "neg", "+": "pos", "~": "invert"}
# Operators that PyTorch has for booleans but not for floats.
LOGICAL = {"&", "|", "^", "~"}

_NO_NUMBER = (
    "the epilogue is traced once, on a symbolic value that has no number: float(), int(), .item() and functions of "
    "math and numpy cannot take it; use the torch function of the same name"
)
_NO_BRANCH = (
    "the epilogue branches on data (if, while, and, or, not, min, max or a chained comparison of a symbolic value), "
    "but it is traced once for all elements; use torch.where(condition, a, b), torch.minimum, torch.maximum, and &, | "
    "and ~ between comparisons"
)
_NO_SEQUENCE = (
    "the epilogue indexes, iterates over or takes the length of a symbolic value, which stands for every element "
    "alike; pass other tensors through operands=, already sliced"
)


class Symbolic:
    """Operators and torch functions on a symbolic value, as the two hooks of a subclass compute them."""

    __slots__ = ()
    __array_ufunc__ = None  # a numpy scalar on the left then leaves the operator to us
    __hash__ = object.__hash__

    def _operate(self, symbol: str, *arguments: Any) -> Any:
        raise NotImplementedError

    def _call(self, function: Callable[..., Any] | str, arguments: tuple, keywords: dict[str, Any]) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, cls):
                return argument._call(function, args, kwargs or {})
        raise EpilogueError(f"{getattr(function, '__name__', function)} of a list of values is not in the language")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._method(name)

    def _method(self, name: str) -> Callable[..., Any]:
        def method(*arguments: Any, **keywords: Any) -> Any:
            return self._call(name, (self, *arguments), keywords)

        return method

    @property
    def dtype(self) -> torch.dtype:
        """float32, the type of all arithmetic in an epilogue."""
        return torch.float32

    def __abs__(self) -> Any:
        return self._call("abs", (self,), {})

    def __bool__(self) -> NoReturn:
        raise EpilogueError(_NO_BRANCH)

    def _refuse_number(self, *_: Any) -> NoReturn:
        raise EpilogueError(_NO_NUMBER)

    def _refuse_sequence(self, *_: Any) -> NoReturn:
        raise EpilogueError(_NO_SEQUENCE)

    __float__ = __int__ = __index__ = __complex__ = __array__ = item = tolist = numpy = _refuse_number
    __len__ = __iter__ = __getitem__ = __setitem__ = __contains__ = _refuse_sequence


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
        raise EpilogueError(f"the epilogue changes a value in place with {symbol}=; write z = z {symbol} ... instead")

    return operator


def _prefix(symbol: str) -> Callable[[Any], Any]:
    def operator(self: Symbolic) -> Any:
        return self._operate(symbol, self)

    return operator


for _symbol, _name in INFIX.items():
    setattr(Symbolic, f"__{_name}__", _infix(_symbol))
    setattr(Symbolic, f"__r{_name}__", _reflected(_symbol))
    setattr(Symbolic, f"__i{_name}__", _in_place(_symbol))
for _symbol, _name in COMPARISONS.items():
    setattr(Symbolic, f"__{_name}__", _infix(_symbol))
for _symbol, _name in PREFIX.items():
    setattr(Symbolic, f"__{_name}__", _prefix(_symbol))


def refuse_attribute(name: str) -> NoReturn:
    """For a method or attribute of Tensor that the language lacks."""
    raise UnknownMethodError(
        f"Tensor.{name} is not in the epilogue language, which has elementwise functions of the pre-activation and the "
        "operands; for a reduction over the last dimension use reduce="
    )
