"""Matrix product, division by two, sum of each row, scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GemmDivideSumScale(nn.Module):
    """`((x @ weight.T) / 2).sum(1, keepdim=True) * scaling_factor`: x `[M, input_size]` to `[M, 1]`."""

    def __init__(self, input_size: int, hidden_size: int, scaling_factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size, input_size))
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight.T) / 2).sum(1, keepdim=True) * self.scaling_factor
