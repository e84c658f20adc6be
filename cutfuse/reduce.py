"""Reductions over any dimensions, of a tensor or of a program over it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from . import arguments, composed, native
from .composed import PyTorchCall
from .epilogue import Epilogue
from .epilogue.program import arithmetic_dtype
from .epilogue.table import REDUCTIONS
from .epilogue.types import types_of
from .invariance import is_batch_invariant, may_be_batch_invariant, require
from .layer import autograd, calls
from .layer.call_plans import plan_reduce_call
from .layer.layouts import aligned_rows


class ReduceCall(NamedTuple):
    """A call in normal form: what runs, and what `explain` describes."""

    x: Tensor
    dims: tuple[int, ...]  # ascending, none negative
    op: str
    keepdim: bool
    operands: list[Tensor]  # each broadcasts against x
    prologue: Epilogue
    out_dtype: torch.dtype
    composed_because: str  # why PyTorch's own operations run; empty where the operator does


def reduce(
    x: Tensor,
    dim: int | Sequence[int] | None,
    op: str = "sum",
    keepdim: bool = False,
    prologue: Callable[..., Tensor] | Epilogue | None = None,
    *,
    operands: Sequence[Tensor | float] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`op` of `prologue(x, *operands)` over one dimension, a tuple of them, or all (None), in one read.

    Args:
        x: a tensor of any shape, device and strides.
        dim: a dimension or a tuple of them, counted from the end where negative; None for all.
        op: "sum", "mean", "amax", "amin" or "logsumexp".
        keepdim: keep the reduced dimensions, of size 1.
        prologue: a function of x's elements and the operands that is reduced in place of x, or a `cutfuse.Epilogue`. It
            is traced once for what it reads, on symbolic values, and computed in fp32 (fp64 for fp64).
        operands: numbers, as many as needed, and at most four tensors that broadcast against x.
        out_dtype: fp64, fp32, bf16 or fp16; what PyTorch promotes x and the operands to by default.

    Sums accumulate in fp32 and are rounded once; two runs agree bit for bit. Integers, booleans and complex numbers
    without a prologue are PyTorch's own reduction, and `out_dtype` may be an integer type too.

    Raises:
        IndexError: a dimension that x lacks; amax or amin of nothing.
        ValueError: shapes, devices or an op that do not fit.
        TypeError: types that do not fit.
        EpilogueError: a prologue that cannot be traced, exceeds a program's limits or takes other operands.
    """
    given = x, dim, op, keepdim, prologue, operands, out_dtype
    if torch.compiler.is_dynamo_compiling():
        return _reduce_generally(given)
    if profiler._is_profiler_enabled:
        with profiler.record_function("cutfuse.reduce"):
            return _reduce_generally(given)
    y: Tensor | None = calls.call_reduce(*given)
    if y is None or y is NotImplemented:
        return _reduce_generally(given, remember=y is NotImplemented)
    return y


def _reduce_generally(given: tuple[Any, ...], remember: bool = False) -> Tensor:
    """Any call, with every check. `remember`: the next one like it is to run directly."""
    x, dim, op, keepdim, prologue, operands, out_dtype = given
    call = normalise_reduce(x, dim, op, keepdim, prologue, operands=operands, out_dtype=out_dtype)
    if isinstance(call, PyTorchCall):
        if op == "mean" or x.is_complex():  # others of integers are exact
            require(call.because)
        return _reduce_as_torch(x, call.dims, op, keepdim, out_dtype)
    y = run_reduce(call)
    if remember:
        program = call.prologue.program
        plan = functools.partial(plan_reduce_call, call.x, call.operands, program, call.op, call.dims, y)
        is_general = bool(call.composed_because) or arguments.casts_result(call.out_dtype, call.x.dtype)
        is_general |= is_batch_invariant() and _in_rows(call).x is not call.x
        function, called = native.core.CallFunction.reduce, (prologue, x, operands)
        calls.remember_pass(function, given, called, call.prologue, (call.x, *call.operands), plan, is_general)
    return y


def sum(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """`torch.sum(x, dim, keepdim)`, accumulated in fp32 and rounded once.

    Args:
        x: a tensor of any shape, device and strides. Sums of integers, booleans and complex numbers are PyTorch's own.
        dim: a dimension or a tuple of them, counted from the end where negative; None for all.
        keepdim: keep the reduced dimensions, of size 1.

    Raises:
        IndexError: a dimension that x lacks.
        ValueError: a dimension that is named twice.
        TypeError: an argument of another type, or x is not dense.
    """
    return reduce(x, dim, "sum", keepdim)


def normalise_reduce(
    x: Tensor,
    dim: int | Sequence[int] | None,
    op: str = "sum",
    keepdim: bool = False,
    prologue: Callable[..., Tensor] | Epilogue | None = None,
    *,
    operands: Sequence[Tensor | float] = (),
    out_dtype: torch.dtype | None = None,
) -> ReduceCall | PyTorchCall:
    """Checks a call of `reduce` and decides its path; computes nothing but casts that the path needs."""
    arguments.check_tensor("reduce", "x", x)
    arguments.check_reduction("reduce", op)
    arguments.check_flag("reduce", "keepdim", keepdim)
    dims = arguments.normalise_dims("reduce", dim, x.dim())
    if prologue is None and not x.is_floating_point():
        _check_pytorchs(x, op, out_dtype)
        because = f"x is {x.dtype}: without a prologue its reduction is PyTorch's own"
        return PyTorchCall(op, [x], because, dims)
    x = arguments.to_floating("reduce", x)
    numbers, tensors = arguments.split_operands("reduce", operands, x.device)
    shape = arguments.broadcast_shape("reduce", x, tensors) if tensors else x.shape
    if not arguments.is_shape(shape, x.shape) and shape != x.shape:  # of symbols, first what is known without a guard
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"cutfuse.reduce: operands of shape {shapes} do not broadcast against x's {tuple(x.shape)}")
    resolved = arguments.resolve_epilogue("reduce", prologue, numbers, types_of(x, *tensors))
    out_dtype = arguments.resolve_out_dtype("reduce", out_dtype, x, resolved, op)
    composed_because = arguments.why_wrapped((x,), tensors)
    composed_because = composed_because or arguments.why_composed(x, arithmetic_dtype(x, tensors))
    if not composed_because:
        tensors = [arguments.to_kernel_dtype(t) for t in tensors]
    return ReduceCall(x, dims, op, keepdim, tensors, resolved, out_dtype, composed_because)


def run_reduce(call: ReduceCall) -> Tensor:
    require(call.composed_because)
    x, dims, op, keepdim, operands, prologue, out_dtype, composed_because = call
    if composed_because:
        return composed.reduce(x, operands, prologue.program, op, dims, out_dtype, keepdim)
    kernel_dtype = arguments.kernel_out_dtype(out_dtype, x.dtype)
    own = _in_rows(call) if may_be_batch_invariant() else call
    y = autograd.reduce(own.x, own.operands, prologue.program.text, op, own.dims, kernel_dtype)
    if keepdim or own.x is not x:
        kept = [(d, size) for d, size in enumerate(x.shape) if keepdim or d not in dims]
        y = y.reshape([1 if d in dims else size for d, size in kept])
    return y if kernel_dtype == out_dtype else y.to(out_dtype)


def _in_rows(call: ReduceCall) -> ReduceCall:
    """The call on a matrix whose rows are what is reduced, of which kernels take one as any other; itself if it is."""
    x, dims = call.x, call.dims
    kept = tuple([d for d in range(x.dim()) if d not in dims])
    columns = math.prod([x.shape[d] for d in dims])
    if not x.numel() or (kept + dims == tuple(range(x.dim())) and x.is_contiguous() and _are_aligned(x, columns)):
        return call

    def to_rows(tensor: Tensor) -> Tensor:
        return tensor.expand(x.shape).permute(kept + dims).reshape(-1, columns)

    # Not by _replace, which Dynamo of PyTorch 2.8 does not trace.
    operands = [to_rows(t) for t in call.operands]
    return ReduceCall(
        aligned_rows(to_rows(x)), (1,), call.op, call.keepdim, operands, call.prologue, call.out_dtype, ""
    )


def _are_aligned(x: Tensor, columns: int) -> bool:
    return aligned_rows(matrix := x.view(-1, columns)) is matrix


def _check_pytorchs(x: Tensor, op: str, out_dtype: torch.dtype | None) -> None:
    """Of PyTorch's own reduction: of integers, booleans and complex numbers."""
    arguments.check_not_quantized("reduce", "x", x)
    if out_dtype is None:
        return
    arguments.check_dtype("reduce", "out_dtype", out_dtype)
    arguments.check_real("reduce", "x", x)  # a cast of the result would drop its imaginary part
    if op == "mean":
        arguments.check_floating("reduce", "the mean's out_dtype", out_dtype)


def _reduce_as_torch(x: Tensor, dims: tuple[int, ...], op: str, keepdim: bool, out_dtype: torch.dtype | None) -> Tensor:
    if op == "mean" and not x.is_complex():
        x = x.to(out_dtype or torch.get_default_dtype())
    y = REDUCTIONS[op](x, dims, keepdim=keepdim)
    return y if out_dtype is None else y.to(out_dtype)
