"""Plans of direct calls, made of a call on the general path and its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..native import address_of
from ..ops.cuda import reduction_workspace, shapes_and_strides
from ..ops.cuda_backward import gradient_layout
from ..ops.layout import elementwise_layout, reduction_layout
from ..planning.device import dtype_codes, reduction_codes
from ..planning.fused import changes_setting, plan_call
from ..planning.joined import plan_of
from ..planning.linear_launch import matrices_of
from ..planning.linear_plan import LinearArguments
from ..planning.specialize import (
    Epilogues,
    Matrix,
    are_requested,
    find_backward,
    find_epilogues,
    find_pass,
    find_pointwise,
    find_reduce,
    request,
)

if TYPE_CHECKING:
    from .._C import CallPlan

Layout = tuple[int, int, int, int]  # type, and the strides of three dimensions
Result = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# Extents (outer, reduced, inner), the layout of what is summed, bytes of workspace, the result and its type.
GradientSum = tuple[tuple[int, ...], Layout, int, Result, int]
# The derivative with respect to x (0) or operand k - 1 (k) as it is stored, its type, and how it is summed.
GradientOutput = tuple[int, Result, int, GradientSum | None]
# The partial sums' layout, and how they are summed.
ColumnSum = tuple[Result, GradientSum]


def _result_of(y: Tensor) -> Result:
    return tuple(y.shape), y.stride(), y.dtype


def plan_linear(arguments: LinearArguments, y: Tensor, is_bias_apart: bool = False) -> CallPlan | None:
    core = native.core
    plan = plan_call(arguments)
    if is_bias_apart and not plan.is_fused:
        return core.general_call()
    if plan.copies_bias or not y.is_contiguous() or (not plan.is_fused and changes_setting(arguments.x)):
        return core.general_call()
    matrices = matrices_of(arguments)
    device = arguments.x.device.index or 0
    find = find_epilogues if plan.is_fused else find_pass
    epilogues = find(plan, device, arguments.program, matrices)
    request(epilogues)
    if not are_requested(epilogues):
        return None  # the call was captured in a graph; a later one asks for them
    layouts = [matrix[1:] for matrix in matrices]
    return core.linear_call(plan, arguments.program.native, layouts, epilogues, _result_of(y))


def plan_joined_call(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], y: Tensor
) -> CallPlan | None:
    core = native.core
    plan = plan_of(x, weights, biases)
    if plan is None:
        return core.general_call()
    return core.joined_call(plan, [bias is not None for bias in biases], _result_of(y))


class LaidOut(NamedTuple):
    """A call's tensors as one launch takes them: x, then the operands. epilogues: the program in its kernel."""

    extents: tuple[int, ...]
    layouts: list[Layout]
    epilogues: Epilogues


def lay_out_pointwise(x: Tensor, operands: Sequence[Tensor], program: Program, y: Tensor) -> LaidOut | None:
    """Of a call with the result y, which may be on the meta device; None where one launch does not do."""
    tensors = (x, *operands)
    layout = elementwise_layout(y.stride(), *shapes_and_strides(tensors), y.shape)
    if layout is None:
        return None
    laid_out = _layouts(tensors, layout.strides)
    matrices = _matrices(tensors, laid_out)
    address, code = 0 if y.is_meta else y.data_ptr(), dtype_codes()[y.dtype]
    device = x.device.index or 0
    epilogues = find_pointwise(device, program, layout.extents, matrices[0], matrices[1:], address, code)
    return LaidOut(layout.extents, laid_out, epilogues)


def plan_pointwise(x: Tensor, operands: Sequence[Tensor], program: Program, y: Tensor) -> CallPlan | None:
    core = native.core
    found = lay_out_pointwise(x, operands, program, y)
    if found is None:
        return core.general_call()
    extents, (of_x, *others), epilogues = found
    request(epilogues)
    if not are_requested(epilogues):
        return None  # as of a linear layer
    specialization = epilogues[0] if epilogues else None
    code = dtype_codes()[y.dtype]
    return core.pointwise_call(extents, of_x, code, program.native, others, _result_of(y), specialization)


def lay_out_reduction(
    x: Tensor, operands: Sequence[Tensor], program: Program, reduction: str, dims: tuple[int, ...]
) -> LaidOut | None:
    """None where one launch does not do, or its result is in another order than the dimensions that are kept."""
    tensors = (x, *operands)
    layout = reduction_layout(*shapes_and_strides(tensors), dims)
    if layout is None or layout.result_order is not None:
        return None
    laid_out = _layouts(tensors, layout.strides)
    matrices = _matrices(tensors, laid_out)
    code, device = reduction_codes()[reduction], x.device.index or 0
    epilogues = find_reduce(device, program, layout.extents, matrices[0], matrices[1:], code)
    return LaidOut(layout.extents, laid_out, epilogues)


def plan_reduce(
    x: Tensor, operands: Sequence[Tensor], program: Program, reduction: str, dims: tuple[int, ...], y: Tensor
) -> CallPlan | None:
    core = native.core
    found = lay_out_reduction(x, operands, program, reduction, dims) if y.is_contiguous() else None
    if found is None:
        return core.general_call()
    extents, (of_x, *others), epilogues = found
    codes, reduction_code = dtype_codes(), reduction_codes()[reduction]
    request(epilogues)
    if not are_requested(epilogues):
        return None  # as of a linear layer
    workspace = reduction_workspace(extents, codes[x.dtype], reduction_code, x.device)
    return core.reduce_call(
        extents,
        of_x,
        reduction_code,
        codes[y.dtype],
        program.native,
        others,
        _result_of(y),
        workspace,
        epilogues[0] if epilogues else None,
    )


def plan_backward(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: Program,
    wanted: Sequence[int],
    sums_columns: bool,
    gradients: Sequence[Tensor],
) -> CallPlan | None:
    """gradients: those that are wanted and, with sums_columns, x's summed over its rows."""
    core = native.core
    if not wanted or (sums_columns and not x.is_contiguous()):
        return core.general_call()
    found, tensors = gradients[: len(wanted)], (grad, x, *operands)
    dense = torch.empty_like(x, device="meta")
    layout = gradient_layout(dense, tensors, sums_columns=sums_columns)
    stored = gradient_outputs(dense, wanted, [t.shape for t in found], [_result_of(t) for t in found], x.device)
    if layout is None or stored is None:
        return core.general_call()
    laid_out = _layouts(tensors, layout.strides)
    matrices = _matrices(tensors, laid_out)
    # With address 0, which counts as aligned, what is stored to be summed.
    outputs = [(k, 0 if sum_ else t.data_ptr(), code) for (k, _, code, sum_), t in zip(stored, found, strict=True)]
    device = x.device.index or 0
    problem = layout.extents, matrices[0], matrices[1], matrices[2:], outputs, sums_columns
    epilogues = find_backward(device, program, *problem)
    request(epilogues)
    if not are_requested(epilogues):
        return None  # as of a linear layer
    sums = None
    if sums_columns:
        _, rows, columns = layout.extents
        blocks = core.pointwise_backward_row_blocks(rows, columns)
        sums = column_sum(blocks, columns, torch.float32, _result_of(gradients[-1]), x.device)
    return core.backward_call(
        layout.extents,
        laid_out[0],
        laid_out[1],
        program.native,
        laid_out[2:],
        stored,
        sums,
        epilogues[0] if epilogues else None,
    )


def gradient_outputs(
    dense: Tensor,
    wanted: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    gradients: Sequence[Result],
    device: torch.device,
) -> list[GradientOutput] | None:
    """What the kernel of the gradients stores, in the shape and layout of `dense`, and what of that is summed.

    shapes: what `wanted` inputs, x (0) and operands (k - 1 for k), have, and broadcast to dense's. gradients: of them,
    contiguous. None where one launch does not sum one of them.
    """
    codes = dtype_codes()
    found: list[GradientOutput] = []
    for k, shape, gradient in zip(wanted, shapes, gradients, strict=True):
        if shape == dense.shape:
            found.append((k, gradient, codes[gradient[2]], None))
            continue
        aligned = (1,) * (dense.dim() - len(shape)) + tuple(shape)
        dims = tuple([d for d, size in enumerate(aligned) if size != dense.shape[d]])
        layout = reduction_layout((dense.shape,), (dense.stride(),), dims) if dims else None
        if layout is None or layout.result_order is not None:
            return None
        tangent = tuple(dense.shape), dense.stride(), torch.float32
        code, (outer, reduced, inner) = codes[torch.float32], layout.strides[0]
        total = gradient_sum(layout.extents, (code, outer, reduced, inner), gradient, device)
        found.append((k, tangent, code, total))
    return found


def gradient_sum(extents: tuple[int, ...], x: Layout, result: Result, device: torch.device) -> GradientSum:
    """The sum of a tensor over the middle extent, as the native module takes it."""
    workspace = reduction_workspace(extents, x[0], reduction_codes()["sum"], device)
    return extents, x, workspace, result, dtype_codes()[result[2]]


def column_sum(rows: int, columns: int, dtype: torch.dtype, result: Result, device: torch.device) -> ColumnSum:
    """The sum over the rows of a matrix of this type, as the native module takes it."""
    partials = (rows, columns), (columns, 1), torch.float32
    return partials, gradient_sum((1, rows, columns), (dtype_codes()[dtype], 0, columns, 1), result, device)


def _layouts(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Layout]:
    codes = dtype_codes()
    return [(codes[t.dtype], outer, row, column) for t, (outer, row, column) in zip(tensors, strides, strict=True)]


def _matrices(tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Matrix]:
    return [(address_of(t), *layout) for t, layout in zip(tensors, layouts, strict=True)]
