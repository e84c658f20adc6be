"""Linear, sigmoid, sum of each row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import models
from ..composed import PyTorchCall
from ..linear import LinearCall, describe_unfused, linear, prepare_linear
from .drop_in import NO_MATRIX, DropIn, Result, describe_plain_model, is_symbolic
from .plain_linear import is_plain, why_not_plain
from .prepares_weight import PreparesWeight


class LinearSigmoidSum(DropIn, PreparesWeight, models.LinearSigmoidSum):
    """Drop-in for `cutfuse.models.LinearSigmoidSum`: x `[M, input_size]` to `[M, 1]`."""

    def forward(self, x: Tensor) -> Tensor:
        # the sum is over dim 1, which is the rows' only in a matrix
        if is_symbolic(x) or x.dim() != 2 or not is_plain(self.linear):
            return super().forward(x)
        return self._call(linear, x)

    def prepare_call(self, x: Tensor) -> LinearCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        reason = why_not_plain(self.linear)
        if reason:
            return describe_plain_model(x, reason)
        if x.dim() != 2:
            return describe_unfused(x, self._weight(), self.linear.bias, NO_MATRIX)
        return self._call(prepare_linear, x)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(x, self._weight(), self.linear.bias, epilogue=torch.sigmoid, reduce="sum", keepdim=True)

    def _plain_weight(self) -> Tensor:
        return self.linear.weight
