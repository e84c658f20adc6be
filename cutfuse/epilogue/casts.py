"""Casts.

Arithmetic is fp32 (fp64 for fp64) whatever the types are. So a cast to a narrower type rounds, and every other one only
marks the value as one of that type, which decides promotion and the result's type.
"""

from __future__ import annotations

from typing import Any

import torch

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, apply, constant, topological
from cutfuse.epilogue.registry import composes
from cutfuse.epilogue.table import op_table
from cutfuse.epilogue.types import INPUTS, InputDtype, ValueType

# The ops that round, by the type to which they do.
ROUNDING = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float"}


def cast(value: Expr, dtype: torch.dtype | InputDtype) -> Expr:
    """The value as one of another type. Raises EpilogueError for types in which an epilogue cannot compute."""
    if isinstance(dtype, InputDtype):
        return value if value.type == INPUTS else apply(op_table().identity, (value,), (), INPUTS)
    if value.type.dtype is dtype and not value.type.is_number:
        return value
    type = ValueType(dtype, value.type.is_scalar)
    if dtype is torch.bool:
        return apply(op_table().infix["!="], (value, constant(0.0)), (), type)
    if dtype is torch.float64 and not _may_be_wide(value):
        raise EpilogueError(
            f"the epilogue casts {value.type.dtype} to torch.float64, but its arithmetic is fp32: pass x or the "
            "operand in float64"
        )
    if dtype not in (*ROUNDING, torch.float64):
        raise EpilogueError(
            f"the epilogue casts to {dtype}, which it cannot compute in: it casts to torch.bool and to float16, "
            "bfloat16, float32 and float64; out_dtype= is the result's type"
        )
    if is_rounding(value.type.dtype, dtype):
        return apply(op_table().op(ROUNDING[dtype]), (value,), (), type)
    # A copy, so that the cast is known apart from the op whose result it is, where the types are not known yet.
    return apply(op_table().identity, (value,), (), type)


def _may_be_wide(value: Expr) -> bool:
    """Whether a value may be computed in fp64: the call does, or its types are not known. Numbers are exact."""
    leaves = [node.type for node in topological(value) if node.leaf]
    return value.is_boolean or not leaves or any(item.in_fp64 or item.dtype is None for item in leaves)


def is_rounding(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Whether a cast loses digits of the arithmetic's fp32 or fp64 value. `source` is None where it is not known."""
    if source is torch.bool or target is torch.float64:
        return False
    return target is not torch.float32 or source is torch.float64


@composes("torch.Tensor.float", exact=True)
def to_float(self: Expr, *, memory_format: Any = None) -> Expr:
    """a, of type float32"""
    return cast(self, torch.float32)


@composes("torch.Tensor.half", exact=True)
def to_half(self: Expr, *, memory_format: Any = None) -> Expr:
    """a rounded to float16"""
    return cast(self, torch.float16)


@composes("torch.Tensor.bfloat16", exact=True)
def to_bfloat16(self: Expr, *, memory_format: Any = None) -> Expr:
    """a rounded to bfloat16"""
    return cast(self, torch.bfloat16)


@composes("torch.Tensor.double")
def to_double(self: Expr, *, memory_format: Any = None) -> Expr:
    """a, of type float64, where x or an operand is"""
    return cast(self, torch.float64)


@composes("torch.Tensor.bool")
def to_bool(self: Expr, *, memory_format: Any = None) -> Expr:
    """a != 0"""
    return cast(self, torch.bool)


@composes("torch.Tensor.to")
def to(self: Expr, other: Any = None, *rest: Any, dtype: Any = None, **placement: Any) -> Expr:
    """a rounded to a dtype, or to that of another value; other arguments of it change no value"""
    target = dtype if other is None else other
    if isinstance(target, Expr):
        return type_as(self, target)
    if isinstance(target, str | torch.device) or isinstance(placement.get("device"), str | torch.device):
        raise EpilogueError("the epilogue moves a value to a device: it runs where x is; move the operands beforehand")
    return cast(self, _check_dtype(target))


@composes("torch.Tensor.type")
def type_method(self: Expr, dtype: Any = None, non_blocking: bool = False) -> Expr:
    """a rounded to a dtype"""
    return cast(self, _check_dtype(dtype))


@composes("torch.Tensor.type_as")
def type_as(self: Expr, other: Expr) -> Expr:
    """a rounded to the type of b"""
    return cast(self, other.dtype)


@composes("torch.Tensor.contiguous")
def contiguous(self: Expr, *, memory_format: Any = None) -> Expr:
    """a"""
    return self


def _check_dtype(dtype: Any) -> torch.dtype | InputDtype:
    if not isinstance(dtype, torch.dtype | InputDtype):
        raise EpilogueError(f"the epilogue casts to {dtype!r}, which is not a torch.dtype")
    return dtype
