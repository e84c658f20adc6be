"""What the drop-ins have in common: tracers that see PyTorch's operations only are given the plain model."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..composed import PyTorchCall
from .prepares_weight import PreparesWeight

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
