"""Plans and runs the products of one x with several weights, side by side in one result.

Where the products are small, one kernel for all of them fills the device that each of them leaves idle, as for the
queries, keys and values of an attention layer. The weights stay where they lie: the kernel has a descriptor of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from .device import device_facts, on_device, stream_of
from .linear_plan import MatrixLayout, is_aligned, matrix_layout, plan_layouts

if TYPE_CHECKING:
    from .._C import LinearPlan

MOST_WEIGHTS = 3


def plan_joined(
    x: MatrixLayout,
    weights: Sequence[MatrixLayout],
    dtype: torch.dtype,
    device: torch.device,
    issuer: str = "call",
    only: str = "",
) -> LinearPlan | None:
    """The plan for matrices of these layouts; None where no kernel could read the weights."""
    first = weights[0]
    are_like_first = all(weight[1:4] == first[1:4] and weight[0] > 0 for weight in weights)
    if len(weights) > MOST_WEIGHTS or dtype.itemsize != 2 or not are_like_first:
        return None
    rows = tuple(weight[0] for weight in weights)
    together = sum(rows), *first[1:4], all(weight[4] for weight in weights)
    return plan_layouts(
        x,
        together,
        None,
        dtype,
        dtype,
        "none",
        0.0,
        0.0,
        0.0,
        0,
        0,
        "tf32",
        False,
        device_facts(device),
        only,
        issuer=issuer,
        joined_rows=rows,
    )


def plan_of(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> LinearPlan | None:
    """The plan of the fastest kernel for these tensors; None where no kernel takes them.

    Whether one kernel is faster than a product for each weight was decided when the operator was put into a graph.
    """
    given_biases = [bias for bias in biases if bias is not None]
    if any(tensor.dtype != x.dtype or tensor.device != x.device for tensor in (*weights, *given_biases)):
        return None
    if not all(_is_read(bias, weight) for bias, weight in zip(biases, weights, strict=True)):
        return None
    given = matrix_layout(x), [matrix_layout(weight) for weight in weights], x.dtype, x.device
    plan = plan_joined(*given)
    if plan is None or plan.is_fused:
        return plan
    best = plan.alternatives[0]
    return None if plan.ruled_out or best.rejection else plan_joined(*given, only=best.name)


def _is_read(bias: Tensor | None, weight: Tensor) -> bool:
    """Whether a kernel reads a bias: one number for each row of the weight, in one piece."""
    return bias is None or (bias.shape == weight.shape[:1] and bias.stride(0) == 1 and is_aligned(bias))


def run_joined(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], plan: LinearPlan | None
) -> Tensor:
    """`[M, sum of N]`: by a fused plan, or by PyTorch's products where there is none."""
    if plan is None:
        return composed_joined(x, weights, biases)
    y = x.new_empty((x.shape[0], sum(weight.shape[0] for weight in weights)))
    index = x.device.index
    with on_device(index):
        native.core.launch_joined(
            plan,
            stream_of(index),
            x.data_ptr(),
            [weight.data_ptr() for weight in weights],
            [0 if bias is None else bias.data_ptr() for bias in biases],
            y.data_ptr(),
        )
    return y


def composed_joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], 1)
