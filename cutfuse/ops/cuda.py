"""The operators on CUDA tensors. Each computes a layout, allocates with PyTorch, and launches on the current stream.

Workspaces come from `torch.empty` and nothing synchronises, so that CUDA graphs can capture every operator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import composed, native
from ..epilogue import Program
from ..planning.device import dtype_codes, multiprocessors, on_device, reduction_codes, stream_of
from ..planning.fused import cublas_linear, plan_call
from ..planning.joined import plan_of, run_joined
from ..planning.linear_launch import launch_after_product, launch_fused
from ..planning.linear_plan import LinearArguments
from ..planning.planes import Planes
from ..planning.prepared import planes_of
from ..planning.specialize import Matrix, find_pointwise, find_reduce, request
from ..planning.training_step import product_arguments, storing
from ..precision import SPLIT_MODES, product_mode
from . import schema
from .layout import Layout, elementwise_layout, reduction_layout, reduction_runs


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    out_dtype: torch.dtype,
    snapshot: Tensor | None = None,
    planes: Tensor | None = None,
    scheme: int = 0,
) -> Tensor:
    kept = planes_of(weight, snapshot, planes, scheme)
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
    scheme: int = 0,
) -> Tensor:
    kept = planes_of(weight, snapshot, planes, scheme)
    return _run(LinearArguments(x, weight, bias, operands, Program.parse(program), reduction, out_dtype), kept)


def linear_with_pre_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    out_dtype: torch.dtype,
    snapshot: Tensor | None = None,
    planes: Tensor | None = None,
    scheme: int = 0,
) -> tuple[Tensor, Tensor]:
    kept = planes_of(weight, snapshot, planes, scheme)
    arguments = storing(LinearArguments(x, weight, bias, operands, Program.parse(program), "none", out_dtype))
    plan = plan_call(arguments, kept)
    if plan.is_fused:
        z = x.new_empty((x.shape[0], weight.shape[0]))
        return launch_fused(plan, arguments, kept, z), z
    z = cublas_linear(x, weight, bias)
    return launch_after_product(plan, z, arguments), z


def product(a: Tensor, b: Tensor, mode: str, issuer: str = "call") -> Tensor:
    if a.dtype != torch.float32:
        return _run(product_arguments(a, b, issuer))
    mode = product_mode(mode)
    if mode not in SPLIT_MODES:
        return cublas_linear(a, b, None, mode)
    return _run(product_arguments(a, b, issuer), captured_mode=mode)


def joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    return run_joined(x, weights, biases, plan_of(x, weights, biases))


def _run(arguments: LinearArguments, kept: Planes | None = None, captured_mode: str = "") -> Tensor:
    """Plans the layer and makes the plan's kernel launches. `kept`: the planes of a prepared weight."""
    plan = plan_call(arguments, kept, captured_mode)
    if plan.is_fused:
        return launch_fused(plan, arguments, kept)
    z = cublas_linear(arguments.x, arguments.weight, arguments.bias, captured_mode)
    return launch_after_product(plan, z, arguments)


def pointwise(x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype) -> Tensor:
    parsed = Program.parse(program)
    y = torch.empty_like(x, dtype=out_dtype)
    if not x.numel():
        return y
    layout, (x, *operands) = elementwise(y, (x, *operands))
    codes = dtype_codes()
    laid_out = matrices((x, *operands), layout.strides)
    index = x.device.index
    problem = layout.extents, laid_out[0], laid_out[1:], y.data_ptr(), codes[out_dtype]
    epilogues = find_pointwise(index or 0, parsed, *problem)
    request(epilogues)
    with on_device(index):
        native.core.pointwise(stream_of(index), parsed.native, *problem, epilogues[0] if epilogues else None)
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
    epilogues = find_reduce(index or 0, parsed, layout.extents, laid_out[0], laid_out[1:], code)
    request(epilogues)
    with on_device(index):
        size = reduction_workspace(layout.extents, codes[x.dtype], code, x.device)
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
            epilogues[0] if epilogues else None,
        )
    return y if layout.result_order is None else y.permute(layout.result_order).reshape(layout.result_shape)


def reduction_workspace(extents: tuple[int, ...], dtype: int, reduction: int, device: torch.device) -> int:
    """The bytes of workspace that a reduction with two kernel launches needs."""
    return _workspace_bytes(extents, dtype, reduction, multiprocessors(device.index))


@functools.lru_cache(maxsize=4096)
def _workspace_bytes(extents: tuple[int, ...], dtype: int, reduction: int, multiprocessor_count: int) -> int:
    return native.core.reduce_workspace(extents, dtype, reduction, multiprocessor_count)


def _reduce_in_steps(
    tensors: Sequence[Tensor], program: Program, reduction: str, dims: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """Reduces layouts that do not fit one kernel launch.

    Reduced dimensions that cannot be merged into one are reduced one after another. Where they can be, the kept
    dimensions or the operands are what does not fit, and all tensors are copied once.
    """
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
    """A layout of at most three dimensions in which y is contiguous. If there is none, the tensors are copied once."""
    layout = elementwise_layout(y.stride(), *shapes_and_strides(tensors), y.shape)
    if layout is not None:
        return layout, tensors
    copies = [torch.empty_like(y, dtype=t.dtype).copy_(t) for t in tensors]
    layout = elementwise_layout(y.stride(), *shapes_and_strides(copies), y.shape)
    assert layout is not None  # all have the strides of y, which merge into one dimension
    return layout, copies


def _dense_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the layout of the first tensor, which is itself copied only if its memory has gaps or overlaps."""
    x = tensors[0]
    if torch.empty_like(x, device="meta").stride() != x.stride():
        x = x.clone(memory_format=torch.contiguous_format)
    return [x, *(torch.empty_like(x, dtype=t.dtype).copy_(t) for t in tensors[1:])]


def matrices(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Matrix]:
    """Tensors as the native module takes them: address, type and three strides."""
    codes = dtype_codes()
    return [
        (t.data_ptr(), codes[t.dtype], outer, row, column)
        for t, (outer, row, column) in zip(tensors, strides, strict=True)
    ]
