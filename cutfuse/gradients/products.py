"""The gradients of what a layer multiplies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..planning.training_step import is_turned_weight


def weight_gradient(
    grad_z: Tensor, x: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """`grad_z.T @ x` `[N, K]`, laid out as the weight.

    multiply: gives `a @ b.T`; PyTorch does where it is None.
    """
    if is_turned_weight(weight):
        return weight_gradient(x, grad_z, weight.t(), multiply).t()
    return torch.mm(grad_z.t(), x) if multiply is None else multiply(grad_z.t(), x.t())
