"""The reference models of `cutfuse.models` as drop-ins, with the same arguments and parameters.

Tracers that see PyTorch's operations only are given the plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .. import models
from ..composed import PyTorchCall
from ..invariance import require
from ..linear import LinearCall, describe_unfused, linear, normalise_linear
from ..pointwise import PointwiseCall, normalise_pointwise, pointwise
from ..reduce import ReduceCall, normalise_reduce, reduce
from .fused_linear import PreparesWeight, is_plain, why_not_plain

NO_MATRIX = "x is no matrix, so that the sum over dim 1 is not over rows: the plain model runs"


class DropIn(nn.Module):
    """Before the plain model among a drop-in's bases: a module that makes one call of cutfuse.

    _normalise: what gives the normal form of such a call.
    """

    _normalise: ClassVar[Callable[..., Any]] = staticmethod(normalise_linear)

    def forward(self, x: Tensor) -> Tensor:
        y = None if isinstance(x, Proxy) else self._call(x)  # a graph of torch.fx is the plain model's
        if y is None:
            require("the plain model runs")
            y = super().forward(x)
        return y  # type: ignore[no-any-return]  # a tensor in either case

    def normalise_call(self, x: Tensor) -> LinearCall | PointwiseCall | ReduceCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        call = self._call(x, self._normalise)
        if call is not None:
            return call  # type: ignore[no-any-return]  # it is one of these
        layer: Any = next(self.children(), self)
        reason = "" if layer is self else why_not_plain(layer)
        if reason:  # what another layer computes is not known
            return PyTorchCall("linear", [x], f"{reason}: the plain model runs", flops=0)
        return describe_unfused(x, layer.weight, getattr(layer, "bias", None), NO_MATRIX)

    def _call(self, x: Tensor, function: Callable[..., Any] = linear) -> Any:
        """What the function of the call, or one that takes the same, gives; None where the plain model is to run."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script compiles in its place: the plain model, with the same parameters."""
        plain: Any = copy.copy(self)
        plain.__class__ = next(kind for kind in type(self).__mro__ if not issubclass(kind, DropIn | PreparesWeight))
        model: nn.Module = plain
        return model


class LinearSigmoidSum(DropIn, PreparesWeight, models.LinearSigmoidSum):
    """Drop-in for `cutfuse.models.LinearSigmoidSum`: x `[M, input_size]` to `[M, 1]`."""

    def _call(self, x: Tensor, function: Callable[..., Any] = linear) -> Any:
        # The sum is over dim 1, which is the rows' only in a matrix.
        if x.dim() != 2 or not is_plain(self.linear):
            return None
        return function(x, self._weight(), self.linear.bias, epilogue=torch.sigmoid, reduce="sum", keepdim=True)

    def _plain_weight(self) -> Tensor:
        return self.linear.weight


class Sigmoid(DropIn, models.Sigmoid):
    """Drop-in for `cutfuse.models.Sigmoid` and `torch.nn.Sigmoid`."""

    _normalise = staticmethod(normalise_pointwise)

    def _call(self, x: Tensor, function: Callable[..., Any] = pointwise) -> Any:
        return function(torch.sigmoid, x)


def _divide_scale(z: Tensor, scaling_factor: float) -> Tensor:
    return z / 2 * scaling_factor


class GemmDivideSumScale(DropIn, models.GemmDivideSumScale):
    """Drop-in for `cutfuse.models.GemmDivideSumScale`: x `[M, input_size]` to `[M, 1]`, without the matrix product."""

    def _call(self, x: Tensor, function: Callable[..., Any] = linear) -> Any:
        if x.dim() != 2:  # as of LinearSigmoidSum
            return None
        return function(
            x, self.weight, epilogue=_divide_scale, operands=(self.scaling_factor,), reduce="sum", keepdim=True
        )


class SumReduction(DropIn, models.SumReduction):
    """Drop-in for `cutfuse.models.SumReduction`."""

    _normalise = staticmethod(normalise_reduce)

    def _call(self, x: Tensor, function: Callable[..., Any] = reduce) -> Any:
        return function(x, self.dim, "sum", keepdim=True)


def _sigmoid_scale_residual(z: Tensor, scaling_factor: float) -> Tensor:
    return torch.sigmoid(z) * scaling_factor + z


class GemmSigmoidScaleResidual(DropIn, PreparesWeight, models.GemmSigmoidScaleResidual):
    """Drop-in for `cutfuse.models.GemmSigmoidScaleResidual`: x `[..., input_size]` to `[..., hidden_size]`."""

    def _call(self, x: Tensor, function: Callable[..., Any] = linear) -> Any:
        if not is_plain(self.gemm):
            return None
        operands = (self.scaling_factor,)
        return function(x, self._weight(), self.gemm.bias, epilogue=_sigmoid_scale_residual, operands=operands)

    def _plain_weight(self) -> Tensor:
        return self.gemm.weight
