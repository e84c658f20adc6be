"""Matrix product, division by two, sum of each row, scale."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import models
from ..composed import PyTorchCall
from ..linear import LinearCall, describe_unfused, linear, prepare_linear
from .drop_in import NO_MATRIX, DropIn, Result, is_symbolic


def _divide_scale(z: Tensor, scaling_factor: float) -> Tensor:
    return z / 2 * scaling_factor


class GemmDivideSumScale(DropIn, models.GemmDivideSumScale):
    """Drop-in for `cutfuse.models.GemmDivideSumScale`: x `[M, input_size]` to `[M, 1]`, without the matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x) or x.dim() != 2:  # the sum is over dim 1, which is the rows' only in a matrix
            return super().forward(x)
        return self._call(linear, x)

    def prepare_call(self, x: Tensor) -> LinearCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        if x.dim() != 2:
            return describe_unfused(x, self.weight, None, NO_MATRIX)
        return self._call(prepare_linear, x)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(
            x, self.weight, epilogue=_divide_scale, operands=(self.scaling_factor,), reduce="sum", keepdim=True
        )
