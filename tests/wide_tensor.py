"""What PyTorch computes, in fp64 whatever the types: tensors that carry a value in their own type and in fp64.

A chain of functions on these has PyTorch's types, promotion, refusals and derivatives; its values are rounded to a
narrower type where the chain casts, and nowhere else. This is what an epilogue promises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Rounded = Callable[[Tensor, str, tuple], Tensor]

# Casts that are written in the chain. Others are promotion's, or a backward's.
_CASTS = {getattr(Tensor, name) for name in ("to", "type", "type_as", "half", "bfloat16", "float", "double")}
# Their values are numbers of the result's type, also where that is a narrow one.
_FACTORIES = {"full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"}
_TAKES_MASKS = {"where", "masked_fill", "masked_fill_"}


class _State:
    """How values are computed now."""

    is_cast = False
    rounded: Rounded = staticmethod(lambda exact, name, args: exact)
    laid_out: Callable[[Tensor], Tensor] = staticmethod(lambda wide: wide)


class WideTensor(Tensor):
    """A tensor of some type: `typed` is what PyTorch computes in it, `wide` the value in fp64.

    Booleans and integers are the same in both.
    """

    typed: Tensor
    wide: Tensor

    @staticmethod
    def __new__(cls, typed: Tensor, wide: Tensor) -> WideTensor:
        made = Tensor._make_wrapper_subclass(cls, typed.shape, typed.stride(), 0, dtype=typed.dtype)
        made.typed, made.wide = typed, wide
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = _State.is_cast
        _State.is_cast = before or func in _CASTS
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        finally:
            _State.is_cast = before

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        typed = func(*_typed(args), **_typed(kwargs))
        name = func.overloadpacket.__name__
        wide = _call_wide(func, name, typed, args, kwargs)
        if name.endswith("_") or not isinstance(typed, Tensor | tuple | list):
            return args[0] if isinstance(typed, Tensor) else wide
        if isinstance(typed, Tensor):
            return WideTensor(typed, wide)
        return type(typed)(WideTensor(*pair) for pair in zip(typed, wide, strict=True))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"WideTensor({self.typed}, {self.wide})"


def widen(tensor: Tensor) -> WideTensor:
    return WideTensor(tensor, _State.laid_out(tensor.double() if tensor.is_floating_point() else tensor))


def _typed(tree: Any) -> Any:
    return tree_map_only(WideTensor, lambda tensor: tensor.typed, tree)


def _wide(tree: Any) -> Any:
    """Numbers that PyTorch makes tensors of are not WideTensors."""
    tree = tree_map_only(WideTensor, lambda tensor: tensor.wide, tree)
    return tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, tree)


def _call_wide(func: Any, name: str, typed: Any, args: tuple, kwargs: dict) -> Any:
    if name in _FACTORIES:
        return typed.double() if typed.is_floating_point() else typed
    first = typed[0] if isinstance(typed, tuple | list) else typed
    is_float = isinstance(first, Tensor) and first.is_floating_point()
    if name == "_to_copy":
        return _cast(args[0], first)
    wide_args, wide_kwargs = _wide((args, kwargs))
    if is_float and "dtype" in wide_kwargs:
        wide_kwargs["dtype"] = torch.float64
    if name == "nan_to_num" and is_float:
        info = torch.finfo(first.dtype)
        nan, high, low = (*wide_args[1:], None, None, None)[:3]
        wide_args = (wide_args[0], nan, info.max if high is None else high, info.min if low is None else low)
    tensors = [item for item in (*wide_args, *wide_kwargs.values()) if isinstance(item, Tensor)]
    # Integers and booleans beside floating-point numbers are numbers like these.
    if is_float or any(item.is_floating_point() for item in tensors):
        keeps_masks = name in _TAKES_MASKS or not is_float
        wide_args, wide_kwargs = tree_map_only(
            Tensor,
            lambda item: item if item.dtype == torch.bool and keeps_masks else item.double(),
            (wide_args, wide_kwargs),
        )
    result = func(*wide_args, **wide_kwargs)
    is_view = func._schema.returns and func._schema.returns[0].alias_info is not None
    if is_view:
        return result
    return tree_map_only(Tensor, lambda item: _State.laid_out(_State.rounded(item, name, wide_args)), result)


def _cast(source: Tensor, typed: Tensor) -> Tensor:
    wide = source.wide if isinstance(source, WideTensor) else source
    if not typed.is_floating_point():
        return wide.to(typed.dtype)
    if _State.is_cast and source.dtype != torch.bool and _loses(source.dtype, typed.dtype):
        wide = wide.to(typed.dtype)
    return wide.double()


def _loses(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether numbers of a type are rounded to another one. Those of integer types are small here."""
    if not source.is_floating_point:
        return target in (torch.float16, torch.bfloat16)
    return torch.finfo(target).eps > torch.finfo(source).eps or {source, target} == {torch.float16, torch.bfloat16}


@contextlib.contextmanager
def computed(rounded: Rounded, laid_out: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within it, what an operation gives goes through `rounded`, with its name and arguments, and `laid_out`.

    Inputs go through `laid_out` alone.
    """
    before = _State.rounded, _State.laid_out
    _State.rounded, _State.laid_out = staticmethod(rounded), staticmethod(laid_out)
    try:
        yield
    finally:
        _State.rounded, _State.laid_out = map(staticmethod, before)


def wide_of(tensor: Tensor) -> Tensor:
    """Its value in fp64."""
    return (tensor.wide if isinstance(tensor, WideTensor) else tensor).detach().double()
