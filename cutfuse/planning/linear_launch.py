"""Runs a linear layer's plan: allocates the result and one workspace, and makes the kernel launches in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import composed, native
from ..native import address_of
from .device import dtype_codes, on_device, stream_of
from .linear_plan import LinearArguments
from .planes import Planes
from .specialize import Matrix, find_epilogues, find_pass, request

if TYPE_CHECKING:
    from .._C import LinearPlan


def launch_fused(
    plan: LinearPlan, arguments: LinearArguments, planes: Planes | None = None, pre_activation: Tensor | None = None
) -> Tensor:
    """Runs a fused plan, and returns its result.

    `planes`: the planes of the weight, if the plan reads them. `pre_activation`: where the plan stores it, `[M, N]`,
    contiguous and of x's type; None if it does not.
    """
    x, weight, bias = arguments.x, arguments.weight, arguments.bias
    if plan.copies_bias and bias is not None:
        bias = bias.clone(memory_format=torch.contiguous_format)
    y = _empty_result(plan, arguments)
    workspace = _empty_workspace(plan, x.device)
    index = x.device.index
    reads_planes = plan.reads_weight_planes and planes is not None
    operands = matrices_of(arguments)
    epilogues = find_epilogues(plan, index or 0, arguments.program, operands)
    request(epilogues)
    with on_device(index):
        native.core.launch_fused(
            plan,
            stream_of(index),
            x.data_ptr(),
            weight.data_ptr(),
            _address(bias),
            y.data_ptr(),
            _address(workspace),
            _address(planes.memory if reads_planes and planes is not None else None),
            arguments.program.native,
            operands,
            epilogues,
            _address(pre_activation),
        )
    return y


def launch_after_product(plan: LinearPlan, z: Tensor, arguments: LinearArguments) -> Tensor:
    """Runs the part of an unfused plan that follows cuBLAS. `z`: cuBLAS's result, [M, N], which may be overwritten."""
    core = native.core
    if len(plan.launches) < 2:
        return z
    if not z.numel():
        operands, program, reduction = arguments.operands, arguments.program, arguments.reduction
        return composed.after_product(z, operands, program, reduction, arguments.out_dtype)
    last = plan.launches[-1]
    in_place = isinstance(last, core.PointwisePass) and last.in_place
    y = z if in_place else _empty_result(plan, arguments)
    workspace = _empty_workspace(plan, z.device)
    index = z.device.index
    matrices = matrices_of(arguments)
    epilogues = find_pass(plan, index or 0, arguments.program, matrices)
    request(epilogues)
    with on_device(index):
        core.launch_after_product(
            plan,
            stream_of(index),
            z.data_ptr(),
            y.data_ptr(),
            _address(workspace),
            arguments.program.native,
            matrices,
            epilogues,
        )
    return y


def _empty_result(plan: LinearPlan, arguments: LinearArguments) -> Tensor:
    return torch.empty(plan.output_shape, dtype=arguments.out_dtype, device=arguments.x.device)


def _empty_workspace(plan: LinearPlan, device: torch.device) -> Tensor | None:
    nbytes = plan.workspace_bytes
    return torch.empty(nbytes, dtype=torch.uint8, device=device) if nbytes else None


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def matrices_of(arguments: LinearArguments) -> list[Matrix]:
    """The operands as the native module takes them."""
    m, n = arguments.x.shape[0], arguments.weight.shape[0]
    codes = dtype_codes()
    return [(address_of(t), codes[t.dtype], 0, *operand_strides(t, m, n)) for t in arguments.operands]


def operand_strides(operand: Tensor, m: int, n: int) -> tuple[int, int]:
    """The strides of rows and columns. A stride is 0 where the operand is broadcast to `[m, n]`."""
    rows, columns = operand.shape
    if rows not in (1, m) or columns not in (1, n):
        raise ValueError(f"cutfuse: an operand of shape {(rows, columns)} does not broadcast against {(m, n)}")
    row_stride = operand.stride(0) if rows == m and m > 1 else 0
    column_stride = operand.stride(1) if columns == n and n > 1 else 0
    return row_stride, column_stride
