"""Linear, its sigmoid scaled, plus the linear's result itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GemmSigmoidScaleResidual(nn.Module):
    """`z = gemm(x); sigmoid(z) * scaling_factor + z`: x `[M, input_size]` to `[M, hidden_size]`."""

    def __init__(self, input_size: int, hidden_size: int, scaling_factor: float) -> None:
        super().__init__()
        self.gemm = nn.Linear(input_size, hidden_size)
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.gemm(x)
        return torch.sigmoid(z) * self.scaling_factor + z
