"""The reference models of `cutfuse.models` as drop-ins, with the same arguments and parameters.

Tracers that see PyTorch's operations only are given the plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import models
from ..composed import PyTorchCall
from ..invariance import require
from ..linear import LinearCall, describe_unfused, linear, normalise_linear
from ..pointwise import PointwiseCall, normalise_sigmoid, sigmoid
from ..reduce import ReduceCall, normalise_reduce, reduce
from .fused_linear import PreparesWeight, is_plain, why_not_plain

NO_MATRIX = "x is no matrix, so that the sum over dim 1 is not over rows: the plain model runs"

Result = TypeVar("Result")  # of a drop-in's call: a tensor, or for `explain` the call itself


class DropIn:
    """Before the plain model among a drop-in's bases."""

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script compiles in its place: the plain model, with the same parameters."""
        plain: Any = copy.copy(self)
        plain.__class__ = next(kind for kind in type(self).__mro__ if not issubclass(kind, DropIn | PreparesWeight))
        model: nn.Module = plain
        return model


def describe_plain_model(x: Tensor, reason: str) -> PyTorchCall:
    """For `explain`, where the layer inside is another one than the drop-in computes; what it computes is not known."""
    return PyTorchCall("linear", [x], f"{reason}: the plain model runs", flops=0)


def is_symbolic(x: Any) -> bool:
    """Whether torch.fx.symbolic_trace runs the module; the graph is then the plain model's."""
    return isinstance(x, torch.fx.Proxy)


class LinearSigmoidSum(DropIn, PreparesWeight, models.LinearSigmoidSum):
    """Drop-in for `cutfuse.models.LinearSigmoidSum`: x `[M, input_size]` to `[M, 1]`."""

    def forward(self, x: Tensor) -> Tensor:
        # the sum is over dim 1, which is the rows' only in a matrix
        if is_symbolic(x) or x.dim() != 2 or not is_plain(self.linear):
            require("the plain model runs")
            return super().forward(x)
        return self._call(linear, x)

    def normalise_call(self, x: Tensor) -> LinearCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        reason = why_not_plain(self.linear)
        if reason:
            return describe_plain_model(x, reason)
        if x.dim() != 2:
            return describe_unfused(x, self._weight(), self.linear.bias, NO_MATRIX)
        return self._call(normalise_linear, x)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(x, self._weight(), self.linear.bias, epilogue=torch.sigmoid, reduce="sum", keepdim=True)

    def _plain_weight(self) -> Tensor:
        return self.linear.weight


class Sigmoid(DropIn, models.Sigmoid):
    """Drop-in for `cutfuse.models.Sigmoid` and `torch.nn.Sigmoid`."""

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x):
            require("the plain model runs")
            return super().forward(x)
        return sigmoid(x)

    def normalise_call(self, x: Tensor) -> PointwiseCall:
        """What `cutfuse.explain` describes."""
        return normalise_sigmoid(x)


def _divide_scale(z: Tensor, scaling_factor: float) -> Tensor:
    return z / 2 * scaling_factor


class GemmDivideSumScale(DropIn, models.GemmDivideSumScale):
    """Drop-in for `cutfuse.models.GemmDivideSumScale`: x `[M, input_size]` to `[M, 1]`, without the matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x) or x.dim() != 2:  # the sum is over dim 1, which is the rows' only in a matrix
            require("the plain model runs")
            return super().forward(x)
        return self._call(linear, x)

    def normalise_call(self, x: Tensor) -> LinearCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        if x.dim() != 2:
            return describe_unfused(x, self.weight, None, NO_MATRIX)
        return self._call(normalise_linear, x)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(
            x, self.weight, epilogue=_divide_scale, operands=(self.scaling_factor,), reduce="sum", keepdim=True
        )


class SumReduction(DropIn, models.SumReduction):
    """Drop-in for `cutfuse.models.SumReduction`."""

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x):
            require("the plain model runs")
            return super().forward(x)
        return self._call(reduce, x)

    def normalise_call(self, x: Tensor) -> ReduceCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        return self._call(normalise_reduce, x)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(x, self.dim, "sum", keepdim=True)


def _sigmoid_scale_residual(z: Tensor, scaling_factor: float) -> Tensor:
    return torch.sigmoid(z) * scaling_factor + z


class GemmSigmoidScaleResidual(DropIn, PreparesWeight, models.GemmSigmoidScaleResidual):
    """Drop-in for `cutfuse.models.GemmSigmoidScaleResidual`: x `[..., input_size]` to `[..., hidden_size]`."""

    def forward(self, x: Tensor) -> Tensor:
        if is_symbolic(x) or not is_plain(self.gemm):
            require("the plain model runs")
            return super().forward(x)
        return self._call(linear, x)

    def normalise_call(self, x: Tensor) -> LinearCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        reason = why_not_plain(self.gemm)
        if reason:
            return describe_plain_model(x, reason)
        return self._call(normalise_linear, x)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        operands = (self.scaling_factor,)
        return function(x, self._weight(), self.gemm.bias, epilogue=_sigmoid_scale_residual, operands=operands)

    def _plain_weight(self) -> Tensor:
        return self.gemm.weight
