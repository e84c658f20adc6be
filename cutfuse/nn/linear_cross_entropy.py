"""The head of a language model with its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..head import linear_cross_entropy
from .fused_linear import check_is_linear


class LinearCrossEntropy(nn.Module):
    """`F.cross_entropy` of a linear layer, whose logits are never in memory: see `cutfuse.linear_cross_entropy`.

    It has the parameters, the initialisation and the `state_dict` of `nn.Linear`. Where the model has the layer, for
    generation or tied to the embedding, `from_linear` shares its parameters.

    Args:
        in_features, out_features, bias, device, dtype: as of `nn.Linear`; `out_features` is the size of the vocabulary.
        options: keyword arguments of `cutfuse.linear_cross_entropy`, such as `label_smoothing` and `softcap`.
    """

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias, device, dtype), options)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> LinearCrossEntropy:
        """A head that shares the parameters of `linear`. options: as of the constructor.

        Raises TypeError where `linear` is no `nn.Linear`, and ValueError where it has a forward of its own, as a layer
        of 8 bits has, or hooks, or a parametrization.
        """
        check_is_linear("nn.LinearCrossEntropy.from_linear", linear)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(linear, options)
        return layer.train(linear.training)

    def _take(self, linear: nn.Linear, options: dict[str, Any]) -> None:
        self.weight, self.bias, self.options = linear.weight, linear.bias, options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """x: `[..., in_features]`; target: `[...]` of int64."""
        return linear_cross_entropy(x, self.weight, target, self.bias, **self.options)

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"in_features={features}, out_features={classes}, bias={self.bias is not None}{options}"
