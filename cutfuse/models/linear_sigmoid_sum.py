"""Linear, sigmoid, sum of each row."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LinearSigmoidSum(nn.Module):
    """`sigmoid(linear(x)).sum(1, keepdim=True)`: x `[M, input_size]` to `[M, 1]`."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x)).sum(1, keepdim=True)
