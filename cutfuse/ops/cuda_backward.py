"""The backward operator on CUDA tensors: one kernel computes all elementwise gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..epilogue import Epilogue, EpilogueError, Program, operand
from ..epilogue.table import GRADIENTS
from ..planning.device import dtype_codes, on_device, reduction_codes, stream_of
from ..planning.specialize import find_backward, request
from . import cuda
from .layout import Layout, broadcast_strides, elementwise_layout, reduction_layout


class _Rows(NamedTuple):
    """What the kernel needs to multiply gradients by the derivative of a reduction over the columns of its layout."""

    reduction: str
    result: Tensor  # fp32, one value a row
    ties: Tensor | None  # fp32, how many elements of a row equal its result


def pointwise_backward(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    result: Tensor | None,
    wanted: Sequence[int],
    sums_columns: bool,
) -> list[Tensor]:
    parsed = Program.parse(program)
    if not x.numel():
        zeros = [torch.zeros_like((x, *operands)[k]) for k in wanted]
        return [*zeros, x.new_zeros(x.shape[-1:])] if sums_columns else zeros
    if result is None:
        return _launch(grad, x, operands, parsed, wanted, sums_columns)
    ties = _count_ties(x, operands, program, result) if GRADIENTS[reduction] == "ties" else None
    layout = _rows_layout(grad, x, operands, result)
    if layout is not None:
        rows = _Rows(reduction, result.contiguous(), ties)
        return _launch(grad, x, operands, parsed, wanted, sums_columns, layout, rows)
    if ties is not None:
        grad = grad.float() / ties
    through = _through_reduction(program, reduction)
    if through is None:  # the program has no room for one more operand: compute the factor in memory
        y = cuda.pointwise(x, operands, program, torch.float32)
        weight = y == result if GRADIENTS[reduction] == "ties" else torch.exp(y - result)
        return _launch(grad * weight, x, operands, parsed, wanted, sums_columns)
    return _launch(grad, x, (*operands, result), through, wanted, sums_columns, compares=True)


@functools.lru_cache(maxsize=1024)
def _through_reduction(program: str, reduction: str) -> Program | None:
    """A program whose derivative is that of the given one times that of the reduction.

    It takes the reduction's result as one more operand; None if it exceeds a limit of programs then. The kernel
    multiplies by a reduction's derivative itself only where the reduced dimension is the last one in memory.
    """
    parsed = Program.parse(program)
    value: Any = parsed.expression
    try:
        result: Any = operand(parsed.operand_count)
        weighted: Any = (
            torch.where(value == result, value, 0.0) if GRADIENTS[reduction] == "ties" else torch.exp(value - result)
        )
        return Epilogue.from_expression(weighted, parsed.operand_count + 1).program
    except EpilogueError:
        return None


@functools.lru_cache(maxsize=1024)
def _equals_result(program: str) -> str | None:
    """A program that returns 1 where `program`'s value equals an extra operand, else 0.

    None if it exceeds a limit of programs.
    """
    parsed = Program.parse(program)
    try:
        equal = parsed.expression == operand(parsed.operand_count)
        return Epilogue.from_expression(equal, parsed.operand_count + 1).text
    except EpilogueError:
        return None


def _count_ties(x: Tensor, operands: Sequence[Tensor], program: str, result: Tensor) -> Tensor:
    """How many elements of each reduction equal its result, in fp32 and in result's shape."""
    dims = tuple(d for d in range(x.dim()) if result.shape[d] != x.shape[d])
    equals = _equals_result(program)
    if equals is None:
        x, operands, equals = cuda.pointwise(x, operands, program, torch.float32), (), _equals_result("operands=0")
    assert equals is not None  # the identity has room for one more operand
    if not dims:
        return cuda.pointwise(x, (*operands, result), equals, torch.float32)
    return cuda.reduce(x, (*operands, result), equals, "sum", dims, torch.float32).view(result.shape)


def _rows_layout(grad: Tensor, x: Tensor, operands: Sequence[Tensor], result: Tensor) -> Layout | None:
    """The layout with rows outside and reduced columns inside, or None if a tensor's memory has another order."""
    dims = tuple(d for d in range(x.dim()) if result.shape[d] != x.shape[d])
    dense = torch.empty_like(x, device="meta")
    found = reduction_layout(*cuda.shapes_and_strides((dense, grad, x, *operands)), dims)
    if found is None or found.extents[2] != 1 or found.result_order is not None:
        return None
    rows, columns, _ = found.extents
    return Layout((1, rows, columns), tuple((0, own[0], own[1]) for own in found.strides[1:]))


def _launch(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: Program,
    wanted: Sequence[int],
    sums_columns: bool,
    layout: Layout | None = None,
    weights: _Rows | None = None,
    compares: bool = False,
) -> list[Tensor]:
    """compares: the program compares its value with a reduction's result, so it has to be computed as there."""
    if sums_columns:
        x = x.contiguous()  # rows and columns must not be merged or swapped: the sum is over rows
    dense = torch.empty_like(x)
    outputs = [dense if k == 0 else _empty_tangent(dense, operands[k - 1]) for k in wanted]
    tensors: Sequence[Tensor] = (grad, x, *operands)
    if sums_columns or layout is None:
        layout = gradient_layout(dense, tensors, sums_columns=sums_columns)
    if layout is None:
        layout, tensors = cuda.elementwise(dense, tensors)
    _, rows, columns = layout.extents
    codes = dtype_codes()
    partials = None
    if sums_columns:
        blocks = native.core.pointwise_backward_row_blocks(rows, columns)
        partials = torch.empty((blocks, columns), dtype=torch.float32, device=x.device)
    grad_matrix, x_matrix, *operand_matrices = cuda.matrices(tensors, layout.strides)
    index = x.device.index
    problem = (
        layout.extents,
        grad_matrix,
        x_matrix,
        operand_matrices,
        [(k, t.data_ptr(), codes[t.dtype]) for k, t in zip(wanted, outputs, strict=True)],
    )
    is_interpreted = compares or weights is not None
    epilogues = [] if is_interpreted else find_backward(index or 0, program, *problem, sums_columns)
    request(epilogues)
    with on_device(index):
        native.core.pointwise_backward(
            stream_of(index),
            program.native,
            *problem,
            0 if partials is None else partials.data_ptr(),
            reduction_codes()["none" if weights is None else weights.reduction],
            0 if weights is None else weights.result.data_ptr(),
            0 if weights is None or weights.ties is None else weights.ties.data_ptr(),
            epilogues[0] if epilogues else None,
            compares,
        )
    gradients = [t if k == 0 else _sum_to(t, operands[k - 1]) for k, t in zip(wanted, outputs, strict=True)]
    if partials is not None:
        gradients.append(cuda.reduce(partials, (), "operands=0", "sum", (0,), x.dtype))
    return gradients


def gradient_layout(dense: Tensor, tensors: Sequence[Tensor], *, sums_columns: bool) -> Layout | None:
    """The layout of gradients as `dense` of tensors that broadcast to it; None if a kernel takes none of them as it is.

    sums_columns: `dense` is a contiguous matrix whose rows are summed, so that they are not merged.
    """
    shapes, strides = cuda.shapes_and_strides(tensors)
    if not sums_columns:
        return elementwise_layout(dense.stride(), shapes, strides, dense.shape)
    rows = broadcast_strides(shapes, strides, dense.shape)
    return Layout((1, *dense.shape), tuple((0, *own) for own in rows))


def _empty_tangent(dense: Tensor, operand: Tensor) -> Tensor:
    """Memory for an operand's gradient in x's shape: fp32 if it has to be summed to the operand's shape afterwards."""
    return torch.empty_like(dense, dtype=operand.dtype if operand.shape == dense.shape else torch.float32)


def _sum_to(tangent: Tensor, operand: Tensor) -> Tensor:
    if tangent.shape == operand.shape:
        return tangent
    missing = tangent.dim() - operand.dim()
    shape = (1,) * missing + tuple(operand.shape)
    dims = tuple(d for d, size in enumerate(shape) if size != tangent.shape[d])
    if not dims:
        return tangent.to(operand.dtype).view(operand.shape)
    return cuda.reduce(tangent, (), "operands=0", "sum", dims, operand.dtype).view(operand.shape)
