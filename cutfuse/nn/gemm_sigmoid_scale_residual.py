"""Linear, its sigmoid scaled, plus the linear's result itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import models
from ..composed import PyTorchCall
from ..linear import LinearCall, linear, prepare_linear
from .drop_in import DropIn, Result, describe_plain_model, is_symbolic
from .plain_linear import is_plain, why_not_plain
from .prepares_weight import PreparesWeight


def _sigmoid_scale_residual(z: Tensor, scaling_factor: float) -> Tensor:
    return torch.sigmoid(z) * scaling_factor + z


class GemmSigmoidScaleResidual(DropIn, PreparesWeight, models.GemmSigmoidScaleResidual):
    """Drop-in for `cutfuse.models.GemmSigmoidScaleResidual`: x `[..., input_size]` to `[..., hidden_size]`."""

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x) or not is_plain(self.gemm):
            return super().forward(x)
        return self._call(linear, x)

    def prepare_call(self, x: Tensor) -> LinearCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        reason = why_not_plain(self.gemm)
        if reason:
            return describe_plain_model(x, reason)
        return self._call(prepare_linear, x)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        operands = (self.scaling_factor,)
        return function(x, self._weight(), self.gemm.bias, epilogue=_sigmoid_scale_residual, operands=operands)

    def _plain_weight(self) -> Tensor:
        return self.gemm.weight
