"""Sum over one dimension."""

from __future__ import annotations

from torch import Tensor, nn


class SumReduction(nn.Module):
    """`x.sum(dim, keepdim=True)`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(self.dim, keepdim=True)
