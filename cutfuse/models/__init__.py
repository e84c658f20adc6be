"""The reference models in plain PyTorch: what the drop-ins of `cutfuse.nn` are checked and measured against."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

__all__ = ["GemmDivideSumScale", "GemmSigmoidScaleResidual", "LinearSigmoidSum", "Sigmoid", "SumReduction"]


class LinearSigmoidSum(nn.Module):
    """`sigmoid(linear(x)).sum(1, keepdim=True)`: x `[M, input_size]` to `[M, 1]`."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x)).sum(1, keepdim=True)


class Sigmoid(nn.Module):
    """`sigmoid(x)`, element by element."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class GemmDivideSumScale(nn.Module):
    """`((x @ weight.T) / 2).sum(1, keepdim=True) * scaling_factor`: x `[M, input_size]` to `[M, 1]`."""

    def __init__(self, input_size: int, hidden_size: int, scaling_factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size, input_size))
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight.T) / 2).sum(1, keepdim=True) * self.scaling_factor


class SumReduction(nn.Module):
    """`x.sum(dim, keepdim=True)`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(self.dim, keepdim=True)


class GemmSigmoidScaleResidual(nn.Module):
    """`z = gemm(x); sigmoid(z) * scaling_factor + z`: x `[M, input_size]` to `[M, hidden_size]`."""

    def __init__(self, input_size: int, hidden_size: int, scaling_factor: float) -> None:
        super().__init__()
        self.gemm = nn.Linear(input_size, hidden_size)
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.gemm(x)
        return torch.sigmoid(z) * self.scaling_factor + z


# The modules that the classes were in up to 0.2.0: pickles of whole modules name them.
for _name in ("gemm_divide_sum_scale", "gemm_sigmoid_scale_residual", "linear_sigmoid_sum", "sigmoid", "sum_reduction"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
