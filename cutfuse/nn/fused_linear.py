"""A linear layer with what follows it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import arguments
from ..epilogue import Epilogue, EpilogueError, resolve
from ..epilogue.trace import count_operands
from ..linear import linear
from ..ops.composed import REDUCTIONS

_UNFUSED = "cutfuse.nn.FusedLinear runs its epilogue unfused: {}"


class FusedLinear(nn.Linear):
    """`reduce(epilogue(linear(x), *operands))`: an `nn.Linear`, its `state_dict` too, with what follows it.

    Args:
        in_features, out_features, bias, device, dtype: as of `nn.Linear`.
        epilogue: a function of the pre-activation and the operands that `forward` is given, or a `cutfuse.Epilogue`.
        reduce: "sum", "mean", "amax", "amin" or "logsumexp" over the last dimension, or None.
        keepdim: keep the reduced dimension, of size 1.

    An epilogue that cutfuse cannot fuse runs as PyTorch runs it, after a warning.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        epilogue: Callable[..., Tensor] | Epilogue | None = None,
        reduce: str | None = None,
        keepdim: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if reduce is not None:
            arguments.check_reduction("nn.FusedLinear", reduce)
        self.epilogue = epilogue
        self.reduce = reduce
        self.keepdim = keepdim
        self._suspicion = _why_unfusable(epilogue)
        self._is_fusable = True

    def forward(self, x: Tensor, *operands: Tensor | float) -> Tensor:
        """x `[..., in_features]` and operands that broadcast against `[..., out_features]`."""
        if not self._is_fusable:
            return self._forward_unfused(x, *operands)
        if torch.compiler.is_compiling():
            # An exception while Dynamo traces the epilogue could not be caught here.
            if self._suspicion:
                _warn_while_compiling(self._suspicion)
                return self._forward_unfused(x, *operands)
            return self._forward_fused(x, *operands)
        try:
            return self._forward_fused(x, *operands)
        except EpilogueError as error:
            self._is_fusable = False
            # from nn.Module's two wrappers of forward up to the caller
            warnings.warn(_UNFUSED.format(error), UserWarning, stacklevel=4)
        return self._forward_unfused(x, *operands)

    def _forward_fused(self, x: Tensor, *operands: Tensor | float) -> Tensor:
        return linear(
            x,
            self.weight,
            self.bias,
            epilogue=self.epilogue,
            operands=operands,
            reduce=self.reduce,
            keepdim=self.keepdim,
        )

    def _forward_unfused(self, x: Tensor, *operands: Tensor | float) -> Tensor:
        y = self.epilogue(F.linear(x, self.weight, self.bias), *operands)
        return y if self.reduce is None else REDUCTIONS[self.reduce](y, -1, keepdim=self.keepdim)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if self.epilogue is not None:
            parts.append(f"epilogue={getattr(self.epilogue, '__name__', self.epilogue)!s}")
        if self.reduce is not None:
            parts.append(f"reduce={self.reduce!r}, keepdim={self.keepdim}")
        return ", ".join(parts)


def _why_unfusable(epilogue: Callable[..., Tensor] | Epilogue | None) -> str:
    """Why the epilogue cannot be traced with tensors for operands; empty if it can. With numbers it may still be."""
    if epilogue is None or isinstance(epilogue, Epilogue):
        return ""
    try:
        resolve(epilogue, count_operands(epilogue))
    except Exception as error:  # it is the user's code, which may rely on what is set later
        return str(error) or type(error).__name__
    return ""


@torch.compiler.assume_constant_result
def _warn_while_compiling(reason: str) -> None:
    warnings.warn(_UNFUSED.format(reason), UserWarning, stacklevel=2)
