"""Makes requests to the planner (csrc/plan), and caches the plans that it returns.

A plan names the alternative that was chosen, gives the reason against each other one, and lists the kernel launches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..native import DeviceFacts, address_of
from ..precision import product_mode
from .device import device_facts, dtype_codes, reduction_codes
from .specialize import cost_when_specialized

if TYPE_CHECKING:
    from .._C import LinearPlan

ALIGNMENT = 16  # bytes; the TMA's requirement

Shape = tuple[int, ...]
MatrixLayout = tuple[int, int, int, int, bool]  # rows, columns, their strides, whether it is aligned
VectorLayout = tuple[int, bool]


class LinearArguments(NamedTuple):
    """The arguments of `reduce(program(x @ weight.T + bias, operands))`, with x `[M, K]` and weight `[N, K]`.

    `reduction` is "none" or a reduction's name; the result is `[M, N]`, or `[M]` with a reduction.
    `stores_pre_activation`: `x @ weight.T + bias` is a second result, of x's type. `issuer`: the name of the Issuer, by
    which the planner knows what the launches take of the host.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    operands: Sequence[Tensor]
    program: Program
    reduction: str
    out_dtype: torch.dtype
    stores_pre_activation: bool = False
    issuer: str = "call"


def precision_of(arguments: LinearArguments, captured_mode: str = "") -> str:
    """The product's precision as the planner names it. 16-bit products have only one, which is named "tf32" too."""
    return product_mode(captured_mode) if arguments.x.dtype == torch.float32 else "tf32"


def plan_linear(arguments: LinearArguments, precision: str, has_planes: bool = False, only: str = "") -> LinearPlan:
    """The plan for these arguments, from a cache whose key is everything that a plan depends on.

    `has_planes`: whether the weight has been split before. `only`: the name of an alternative that has to be chosen.

    Raises:
        ValueError: `only` cannot run, or the bias does not fit.
    """
    x, weight, bias = arguments.x, arguments.weight, arguments.bias
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(
            f"cutfuse: the bias has to be {x.dtype} of shape {tuple(weight.shape[:1])}, got {bias.dtype} of shape "
            f"{tuple(bias.shape)}"
        )
    return plan_layouts(
        matrix_layout(x),
        matrix_layout(weight),
        None if bias is None else (bias.stride(0), is_aligned(bias)),
        x.dtype,
        arguments.out_dtype,
        arguments.reduction,
        arguments.program.native.cost,
        cost_when_specialized(arguments.program, arguments.x.dtype, arguments.out_dtype),
        arguments.program.native.generated_cost,
        *_operand_bytes(arguments),
        precision,
        has_planes,
        device_facts(x.device),
        only,
        issuer=arguments.issuer,
        stores_pre_activation=arguments.stores_pre_activation,
    )


def why_no_kernels(device: torch.device) -> str:
    """Why no fused kernel runs on `device`; empty if they do run there."""
    if device.type != "cuda":
        return f"fused products run on CUDA devices, not on {device.type}"
    return native.core.why_no_kernels(device_facts(device))


def first_scheme(precision: str) -> int:
    """The scheme by which a weight is split for products in `precision`, unless the guard chooses another."""
    return int(native.core.first_scheme(native.core.Precision.__members__[precision]))


@functools.lru_cache(maxsize=4096)
def plan_layouts(
    x: MatrixLayout,
    weight: MatrixLayout,
    bias: VectorLayout | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    reduction: str,
    epilogue_cost: float,
    specialized_cost: float | None,
    generated_cost: float,
    operand_bytes: int,
    fetched_bytes: int,
    precision: str,
    weight_has_planes: bool,
    device: DeviceFacts,
    only: str = "",
    issuer: str = "call",
    stores_pre_activation: bool = False,
    joined_rows: tuple[int, ...] = (),
) -> LinearPlan:
    """The plan for tensors of these layouts. `issuer`: the name of the Issuer, which tells who launches the kernels.

    `specialized_cost`: see `cost_when_specialized`. `generated_cost`: of a kernel that torch.compile generates.
    `operand_bytes`, `fetched_bytes`: see `bytes_of_operands`. `joined_rows`: of several weights, which are `weight`
    together: see `joined`.
    """
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
        specialized_cost=specialized_cost,
        generated_cost=generated_cost,
        operand_bytes=operand_bytes,
        fetched_bytes=fetched_bytes,
        precision=core.Precision.__members__[precision],
        weight_has_planes=weight_has_planes,
        stores_pre_activation=stores_pre_activation,
        device=device,
        issuer=core.Issuer.__members__[issuer],
        joined_rows=joined_rows,
    )
    return core.plan_linear(request, only)


def bytes_of_operands(
    shape: Shape, dtype: torch.dtype, operands: Iterable[tuple[Shape, torch.dtype]]
) -> tuple[int, int]:
    """The bytes that the epilogue reads for each element of the output, from operands that are full matrices.

    The second number is of these: what a kernel's copy engine may bring, which is one matrix in the product's type.
    shape: [M, N] of the output. operands: shape and type of each. Only full matrices count: scalars and vectors are
    read once and stay in cache.
    """
    full = [own for extents, own in operands if extents == shape and min(shape) > 1]
    return sum(own.itemsize for own in full), dtype.itemsize if dtype in full else 0


def _operand_bytes(arguments: LinearArguments) -> tuple[int, int]:
    shape = arguments.x.shape[0], arguments.weight.shape[0]
    return bytes_of_operands(shape, arguments.x.dtype, [(tuple(t.shape), t.dtype) for t in arguments.operands])


def matrix_layout(matrix: Tensor) -> MatrixLayout:
    return *matrix.shape, *matrix.stride(), is_aligned(matrix)


def is_aligned(tensor: Tensor) -> bool:
    return address_of(tensor) % ALIGNMENT == 0
