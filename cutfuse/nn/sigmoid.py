"""Sigmoid of a tensor of any shape."""

from __future__ import annotations

from torch import Tensor

from .. import models
from ..pointwise import PointwiseCall, prepare_sigmoid, sigmoid
from .drop_in import DropIn, is_symbolic


class Sigmoid(DropIn, models.Sigmoid):
    """Drop-in for `cutfuse.models.Sigmoid` and `torch.nn.Sigmoid`."""

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x):
            return super().forward(x)
        return sigmoid(x)

    def prepare_call(self, x: Tensor) -> PointwiseCall:
        """What `cutfuse.explain` describes."""
        return prepare_sigmoid(x)
