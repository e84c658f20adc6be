"""Sum over one dimension."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import models
from ..composed import PyTorchCall
from ..reduce import ReduceCall, prepare_reduce, reduce
from .drop_in import DropIn, Result, is_symbolic


class SumReduction(DropIn, models.SumReduction):
    """Drop-in for `cutfuse.models.SumReduction`."""

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x):
            return super().forward(x)
        return self._call(reduce, x)

    def prepare_call(self, x: Tensor) -> ReduceCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        return self._call(prepare_reduce, x)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(x, self.dim, "sum", keepdim=True)
