"""Sigmoid of a tensor of any shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Sigmoid(nn.Module):
    """`sigmoid(x)`, element by element."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)
