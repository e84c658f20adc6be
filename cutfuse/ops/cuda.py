"""The operators on CUDA tensors: lay out, allocate with PyTorch, launch on the current stream.

Workspaces come from `torch.empty`, and nothing synchronises, so CUDA graphs capture every operator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..precision import SPLIT_MODES, product_mode
from . import composed, schema
from .device import dtype_codes, multiprocessors, on_device, reduction_codes, stream_of
from .fused import cublas_linear, plan_call
from .layout import Layout, elementwise_layout, reduction_layout, reduction_runs
from .linear_launch import Matrix, launch_fused
from .linear_plan import LinearArguments
from .planes import Planes
from .prepared import planes_of

_IDENTITY = Program.parse(schema.IDENTITY)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    out_dtype: torch.dtype,
    snapshot: Tensor | None = None,
    planes: Tensor | None = None,
    plan: int = 0,
) -> Tensor:
    kept = planes_of(weight, snapshot, planes, plan)
    return _run(LinearArguments(x, weight, bias, operands, Program.parse(program), "none", out_dtype), kept)


def linear_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    snapshot: Tensor | None = None,
    planes: Tensor | None = None,
    plan: int = 0,
) -> Tensor:
    kept = planes_of(weight, snapshot, planes, plan)
    return _run(LinearArguments(x, weight, bias, operands, Program.parse(program), reduction, out_dtype), kept)


def product(a: Tensor, b: Tensor, mode: str) -> Tensor:
    mode = product_mode(mode)
    if mode not in SPLIT_MODES:
        return cublas_linear(a, b, None, mode)
    return _run(LinearArguments(a, b, None, (), _IDENTITY, "none", a.dtype), captured_mode=mode)


def _run(arguments: LinearArguments, kept: Planes | None = None, captured_mode: str = "") -> Tensor:
    """The launches of the plan. `kept`: the weight's planes."""
    plan = plan_call(arguments, kept, captured_mode)
    if plan.is_fused:
        return launch_fused(plan, arguments, kept)
    y = cublas_linear(arguments.x, arguments.weight, arguments.bias, captured_mode)
    operands, program, out_dtype = arguments.operands, arguments.program.text, arguments.out_dtype
    for launch in plan.launches:
        if isinstance(launch, native.core.PointwisePass):
            y = pointwise(y, operands, program, out_dtype, in_place=launch.in_place)
        elif isinstance(launch, native.core.ReductionPass):
            y = reduce(y, operands, program, arguments.reduction, (1,), out_dtype)
    return y


def pointwise(
    x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype, *, in_place: bool = False
) -> Tensor:
    """`in_place` writes over x, whose lines a product just before has left in the cache."""
    parsed = Program.parse(program)
    if not x.numel():
        return torch.empty_like(x, dtype=out_dtype)
    y = x if in_place else torch.empty_like(x, dtype=out_dtype)
    layout, (x, *operands) = elementwise(y, (x, *operands))
    codes = dtype_codes()
    laid_out = matrices((x, *operands), layout.strides)
    index = x.device.index
    with on_device(index):
        native.core.pointwise(
            stream_of(index),
            parsed.native,
            layout.extents,
            laid_out[0],
            laid_out[1:],
            y.data_ptr(),
            codes[out_dtype],
        )
    return y


def reduce(
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    dims: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:
    parsed = Program.parse(program)
    dims = tuple(dims)
    if not x.numel():
        return composed.reduce(x, operands, parsed, reduction, dims, out_dtype)
    tensors = (x, *operands)
    layout = reduction_layout(*shapes_and_strides(tensors), dims)
    if layout is None:
        return _reduce_in_steps(tensors, parsed, reduction, dims, out_dtype)
    index = x.device.index
    in_order = layout.result_order is None
    y = torch.empty(layout.result_shape if in_order else layout.result_sizes, dtype=out_dtype, device=x.device)
    laid_out = matrices(tensors, layout.strides)
    codes = dtype_codes()
    code = reduction_codes()[reduction]
    with on_device(index):
        size = _workspace_bytes(layout.extents, codes[x.dtype], code, multiprocessors(index))
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device) if size else None
        native.core.reduce(
            stream_of(index),
            parsed.native,
            layout.extents,
            laid_out[0],
            laid_out[1:],
            code,
            y.data_ptr(),
            codes[out_dtype],
            0 if workspace is None else workspace.data_ptr(),
        )
    return y if layout.result_order is None else y.permute(layout.result_order).reshape(layout.result_shape)


@functools.lru_cache(maxsize=4096)
def _workspace_bytes(extents: tuple[int, ...], dtype: int, reduction: int, multiprocessor_count: int) -> int:
    return native.core.reduce_workspace(extents, dtype, reduction, multiprocessor_count)


def _reduce_in_steps(
    tensors: Sequence[Tensor], program: Program, reduction: str, dims: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """Dimensions that are not one in memory, one after the other; other layouts that do not fit after one copy."""
    x, *operands = tensors
    *rest, first = reduction_runs(tuple(x.shape), x.stride(), dims)
    if not rest:
        x, *operands = _dense_copies(tensors)
        return reduce(x, operands, program.text, reduction, dims, out_dtype)
    partial = reduce(x, operands, program.text, reduction, first, torch.float32)
    kept = [d for d in range(x.dim()) if d not in first]
    return reduce(partial, (), schema.IDENTITY, reduction, [kept.index(d) for run in rest for d in run], out_dtype)


def shapes_and_strides(tensors: Sequence[Tensor]) -> tuple[tuple[torch.Size, ...], tuple[tuple[int, ...], ...]]:
    return tuple([t.shape for t in tensors]), tuple([t.stride() for t in tensors])


def elementwise(y: Tensor, tensors: Sequence[Tensor]) -> tuple[Layout, Sequence[Tensor]]:
    """The layout in which y is contiguous. Tensors that do not fit three dimensions are copied once."""
    layout = elementwise_layout(y.stride(), *shapes_and_strides(tensors), y.shape)
    if layout is not None:
        return layout, tensors
    copies = [torch.empty_like(y, dtype=t.dtype).copy_(t) for t in tensors]
    layout = elementwise_layout(y.stride(), *shapes_and_strides(copies), y.shape)
    assert layout is not None  # all have y's strides, which are one dimension in memory
    return layout, copies


def _dense_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All in the layout of the first one, which stays as it is if it has no gaps and no overlaps."""
    x = tensors[0]
    if torch.empty_like(x, device="meta").stride() != x.stride():
        x = x.clone(memory_format=torch.contiguous_format)
    return [x, *(torch.empty_like(x, dtype=t.dtype).copy_(t) for t in tensors[1:])]


def matrices(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Matrix]:
    """As the binding takes them: address, type, three strides."""
    codes = dtype_codes()
    return [
        (t.data_ptr(), codes[t.dtype], outer, row, column)
        for t, (outer, row, column) in zip(tensors, strides, strict=True)
    ]
