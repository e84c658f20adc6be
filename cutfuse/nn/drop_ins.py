"""The reference models of `cutfuse.models` as drop-ins, with the same arguments and parameters.

Tracers that see PyTorch's operations only are given the plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .. import models
from ..composed import PyTorchCall
from ..invariance import require
from ..linear import LinearCall, describe_unfused, linear, normalise_linear
from ..pointwise import PointwiseCall, normalise_pointwise, pointwise
from ..reduce import ReduceCall, normalise_reduce, reduce
from .fused_linear import PreparesWeight, is_plain, why_not_plain

Result = TypeVar("Result")  # of a drop-in's call: a tensor, or for `explain` the call itself


class DropIn(nn.Module):
    """Before the plain model among a drop-in's bases: a module that makes one call of cutfuse.

    _functions: what the call is of, and what gives its normal form.
    """

    _functions: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]] = linear, normalise_linear

    def forward(self, x: Tensor) -> Tensor:
        # The graph of torch.fx.symbolic_trace is the plain model's.
        if isinstance(x, torch.fx.Proxy) or not self._is_fused(x):
            require("the plain model runs")
            return super().forward(x)  # type: ignore[no-any-return]  # a model's forward gives a tensor
        return self._call(self._functions[0], x)  # type: ignore[no-any-return]  # the first of them gives one

    def normalise_call(self, x: Tensor) -> LinearCall | PointwiseCall | ReduceCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        if self._is_fused(x):
            return self._call(self._functions[1], x)  # type: ignore[no-any-return]  # the second gives one of these
        for layer in self.children():
            if reason := why_not_plain(layer):  # what another layer computes is not known
                return PyTorchCall("linear", [x], f"{reason}: the plain model runs", flops=0)
        return self._call(_describe_no_matrix, x)

    def _is_fused(self, x: Tensor) -> bool:
        return True

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        """What a function of `_functions`, or one that takes the same, gives."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script compiles in its place: the plain model, with the same parameters."""
        plain: Any = copy.copy(self)
        plain.__class__ = next(kind for kind in type(self).__mro__ if not issubclass(kind, DropIn | PreparesWeight))
        model: nn.Module = plain
        return model


def _describe_no_matrix(x: Tensor, weight: Any, bias: Tensor | None = None, **_: Any) -> PyTorchCall:
    because = "x is no matrix, so that the sum over dim 1 is not over rows: the plain model runs"
    return describe_unfused(x, weight, bias, because)


class LinearSigmoidSum(DropIn, PreparesWeight, models.LinearSigmoidSum):
    """Drop-in for `cutfuse.models.LinearSigmoidSum`: x `[M, input_size]` to `[M, 1]`."""

    def _is_fused(self, x: Tensor) -> bool:
        return x.dim() == 2 and is_plain(self.linear)  # the sum is over dim 1, which is the rows' only in a matrix

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(x, self._weight(), self.linear.bias, epilogue=torch.sigmoid, reduce="sum", keepdim=True)

    def _plain_weight(self) -> Tensor:
        return self.linear.weight


class Sigmoid(DropIn, models.Sigmoid):
    """Drop-in for `cutfuse.models.Sigmoid` and `torch.nn.Sigmoid`."""

    _functions = pointwise, normalise_pointwise

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(torch.sigmoid, x)


def _divide_scale(z: Tensor, scaling_factor: float) -> Tensor:
    return z / 2 * scaling_factor


class GemmDivideSumScale(DropIn, models.GemmDivideSumScale):
    """Drop-in for `cutfuse.models.GemmDivideSumScale`: x `[M, input_size]` to `[M, 1]`, without the matrix product."""

    def _is_fused(self, x: Tensor) -> bool:
        return x.dim() == 2  # as of LinearSigmoidSum

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(
            x, self.weight, epilogue=_divide_scale, operands=(self.scaling_factor,), reduce="sum", keepdim=True
        )


class SumReduction(DropIn, models.SumReduction):
    """Drop-in for `cutfuse.models.SumReduction`."""

    _functions = reduce, normalise_reduce

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        return function(x, self.dim, "sum", keepdim=True)


def _sigmoid_scale_residual(z: Tensor, scaling_factor: float) -> Tensor:
    return torch.sigmoid(z) * scaling_factor + z


class GemmSigmoidScaleResidual(DropIn, PreparesWeight, models.GemmSigmoidScaleResidual):
    """Drop-in for `cutfuse.models.GemmSigmoidScaleResidual`: x `[..., input_size]` to `[..., hidden_size]`."""

    def _is_fused(self, x: Tensor) -> bool:
        return is_plain(self.gemm)

    def _call(self, function: Callable[..., Result], x: Tensor) -> Result:
        operands = (self.scaling_factor,)
        return function(x, self._weight(), self.gemm.bias, epilogue=_sigmoid_scale_residual, operands=operands)

    def _plain_weight(self) -> Tensor:
        return self.gemm.weight
