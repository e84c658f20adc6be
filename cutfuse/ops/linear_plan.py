"""What the planner (csrc/plan) is asked about a linear layer, and what it answered.

A plan says which way of computing the layer was chosen, with the reason against each other one, and what is launched.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..precision import product_mode
from .device import DeviceFacts, device_facts, dtype_codes, reduction_codes

if TYPE_CHECKING:
    from .._C import LinearPlan

ALIGNMENT = 16  # bytes; the tensor memory accelerator's

MatrixLayout = tuple[int, int, int, int, bool]  # rows, columns, their strides, whether it is aligned
VectorLayout = tuple[int, bool]


class LinearArguments(NamedTuple):
    """Of `reduce(program(x @ weight.T + bias, operands))`: x `[M, K]` and weight `[N, K]`.

    `reduction` is "none" or a reduction's name; the result is `[M, N]`, or `[M]` with a reduction.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    operands: Sequence[Tensor]
    program: Program
    reduction: str
    out_dtype: torch.dtype


def precision_of(arguments: LinearArguments, captured_mode: str = "") -> str:
    """How to multiply. Matrices of 16 bits are multiplied in one way, by the kernels that take fp32 as tf32."""
    return product_mode(captured_mode) if arguments.x.dtype == torch.float32 else "tf32"


def plan_linear(arguments: LinearArguments, precision: str, has_planes: bool = False, only: str = "") -> LinearPlan:
    """The plan for these arguments; cached by everything that it depends on.

    `has_planes`: whether the weight's planes are there already. `only` names the one alternative that is wanted.

    Raises:
        ValueError: `only` cannot run.
    """
    x, weight, bias = arguments.x, arguments.weight, arguments.bias
    return _plan(
        _matrix_layout(x),
        _matrix_layout(weight),
        None if bias is None else (bias.stride(0), _is_aligned(bias)),
        x.dtype,
        arguments.out_dtype,
        arguments.reduction,
        arguments.program.native.cost,
        precision,
        has_planes,
        device_facts(x.device),
        only,
    )


def why_no_kernels(device: torch.device) -> str:
    """Why no fused kernel runs on `device`; empty where they do."""
    if device.type != "cuda":
        return f"fused products run on CUDA devices, not on {device.type}"
    return native.core.why_no_kernels(device_facts(device))


def first_scheme(precision: str) -> int:
    """The scheme of the planes of a weight that products in `precision` take as a rule."""
    return int(native.core.first_scheme(native.core.Precision.__members__[precision]))


@functools.lru_cache(maxsize=4096)
def _plan(
    x: MatrixLayout,
    weight: MatrixLayout,
    bias: VectorLayout | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    reduction: str,
    epilogue_cost: float,
    precision: str,
    weight_has_planes: bool,
    device: DeviceFacts,
    only: str,
) -> LinearPlan:
    core = native.core
    codes = dtype_codes()
    request = core.LinearRequest(
        x=x,
        weight=weight,
        bias=bias,
        input=codes[dtype],
        output=codes[out_dtype],
        reduction=reduction_codes()[reduction],
        epilogue_cost=epilogue_cost,
        precision=core.Precision.__members__[precision],
        weight_has_planes=weight_has_planes,
        device=device,
    )
    return core.plan_linear(request, only)


def _matrix_layout(matrix: Tensor) -> MatrixLayout:
    return *matrix.shape, *matrix.stride(), _is_aligned(matrix)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0
