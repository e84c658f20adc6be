"""A program over tensors of any shape: one read, one write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from . import arguments, composed, native
from .epilogue import Epilogue
from .epilogue.program import arithmetic_dtype
from .epilogue.types import types_of
from .invariance import require
from .layer import autograd, calls
from .layer.call_plans import plan_pointwise_call


class PointwiseCall(NamedTuple):
    """A call in normal form: what runs, and what `explain` describes."""

    x: Tensor
    operands: list[Tensor]  # each broadcasts against x
    epilogue: Epilogue
    out_dtype: torch.dtype
    composed_because: str  # why PyTorch's own operations run; empty where the operator does


def pointwise(
    fn: Callable[..., Tensor] | Epilogue, x: Tensor, *operands: Tensor | float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`fn(x, *operands)` in one kernel: x and the operands are read once, the result is written once.

    Args:
        fn: a function of a value and the operands, such as `lambda z, r: torch.relu(z) + r`, or a `cutfuse.Epilogue`.
            It is traced once for what it reads, on symbolic values, and computed in fp32 (fp64 for fp64).
        x: a tensor of any shape, device and strides; integers and booleans are taken as the default floating type.
        operands: numbers, as many as needed, and at most four tensors that broadcast with x.
        out_dtype: fp64, fp32, bf16 or fp16; what PyTorch promotes x and the operands to by default.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: types that do not fit.
        EpilogueError: a function that cannot be traced, exceeds a program's limits or takes other operands.
    """
    if torch.compiler.is_dynamo_compiling():
        return _pointwise_generally(fn, x, operands, out_dtype)
    if profiler._is_profiler_enabled:
        with profiler.record_function("cutfuse.pointwise"):
            return _pointwise_generally(fn, x, operands, out_dtype)
    y: Tensor | None = calls.call_pointwise(fn, x, operands, out_dtype)
    if y is None or y is NotImplemented:
        return _pointwise_generally(fn, x, operands, out_dtype, remember=y is NotImplemented)
    return y


def _pointwise_generally(
    fn: Any, x: Tensor, operands: tuple[Tensor | float, ...], out_dtype: torch.dtype | None, remember: bool = False
) -> Tensor:
    """Any call, with every check. `remember`: the next one like it is to run directly."""
    call = normalise_pointwise(fn, x, *operands, out_dtype=out_dtype)
    y = run_pointwise(call)
    if remember:
        plan = functools.partial(plan_pointwise_call, call.x, call.operands, call.epilogue.program, y)
        is_general = bool(call.composed_because) or arguments.casts_result(call.out_dtype, call.x.dtype)
        function, given = native.core.CallFunction.pointwise, (fn, x, operands, out_dtype)
        calls.remember_pass(function, given, given[:3], call.epilogue, (call.x, *call.operands), plan, is_general)
    return y


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid(x)` in one read and one write, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: a tensor of any shape, device and strides; integers and booleans are taken as the default floating type.

    Raises:
        TypeError: x is no tensor, complex or not dense.
    """
    return pointwise(torch.sigmoid, x)


def normalise_pointwise(
    fn: Callable[..., Tensor] | Epilogue, x: Tensor, *operands: Tensor | float, out_dtype: torch.dtype | None = None
) -> PointwiseCall:
    """Checks a call of `pointwise` and decides its path; computes nothing but casts that the path needs."""
    arguments.check_tensor("pointwise", "x", x)
    if not callable(fn):
        arguments.refuse_type("pointwise", "the first argument", "a function of x", fn)
    x = arguments.to_floating("pointwise", x)
    numbers, tensors = arguments.split_operands("pointwise", operands, x.device)
    resolved = arguments.resolve_epilogue("pointwise", fn, numbers, types_of(x, *tensors))
    out_dtype = arguments.resolve_out_dtype("pointwise", out_dtype, x, resolved)
    if tensors:
        shape = arguments.broadcast_shape("pointwise", x, tensors)
        if not arguments.is_shape(shape, x.shape):
            x = x.expand(shape)
    composed_because = (
        arguments.why_wrapped((x,), tensors)
        or arguments.why_composed(x, arithmetic_dtype(x, tensors))
        or arguments.why_compiled()
    )
    if not composed_because:
        tensors = [arguments.to_kernel_dtype(t) for t in tensors]
    return PointwiseCall(x, tensors, resolved, out_dtype, composed_because)


_ROUNDED_APART = "the kernels of pointwise may round differently, and the layout of all rows decides which one runs"


def run_pointwise(call: PointwiseCall) -> Tensor:
    x, operands, epilogue, out_dtype, composed_because = call
    require(composed_because or _ROUNDED_APART)
    if composed_because:
        return composed.pointwise(x, operands, epilogue.program, out_dtype)
    kernel_dtype = arguments.kernel_out_dtype(out_dtype, x.dtype)
    y = autograd.pointwise(x, operands, epilogue.program.text, kernel_dtype)
    return y if kernel_dtype == out_dtype else y.to(out_dtype)
