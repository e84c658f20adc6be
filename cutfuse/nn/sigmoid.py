"""Sigmoid of a tensor of any shape."""

from __future__ import annotations

from torch import Tensor

from .. import models
from ..pointwise import sigmoid


class Sigmoid(models.Sigmoid):
    """Drop-in for `cutfuse.models.Sigmoid` and `torch.nn.Sigmoid`."""

    def forward(self, x: Tensor) -> Tensor:
        return sigmoid(x)
