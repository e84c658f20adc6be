"""The cross entropy of a linear layer whose logits nothing else reads: without the matrix of logits.

It is the rows' logsumexp, which a fused layer gives, less the logit of each row's target, which is one product of a row
of x and a row of the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..layer import schema
from ..linear import autocast_inputs
from .layer import layer
from .nodes import is_call, name_of, named_arguments, tensor_of
from .products import same

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropy(NamedTuple):
    """A call of F.cross_entropy with classes as targets, one for each row."""

    target: fx.Node  # [M]
    ignore_index: int
    reduction: str


def cross_entropy_of(node: fx.Node) -> CrossEntropy | None:
    """The cross entropy that a node computes of a matrix of logits; None for weighted, smoothed and other ones."""
    if not is_call(node) or name_of(node) != "cross_entropy" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    named = named_arguments(node, _NAMES)
    logits, target = tensor_of(node.args[0]), tensor_of(named.get("target"))
    plain = all(named.get(name) is None for name in ("weight", "size_average", "reduce"))
    ignore_index, reduction = named.get("ignore_index", -100), named.get("reduction", "mean")
    if not plain or named.get("label_smoothing", 0.0) != 0.0 or reduction not in _REDUCTIONS:
        return None
    if logits is None or target is None or logits.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return None
    if type(ignore_index) is not int or target.device != logits.device or same(logits.shape[-1], 0):
        return None
    return CrossEntropy(named["target"], ignore_index, reduction)


def layer_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """`F.cross_entropy(x @ weight.T + bias, target)` for x `[..., K]` of as many rows as the target `[M]` has items."""
    x, weight, bias = autocast_inputs(x, weight, bias)
    x = x.reshape(target.shape[0], x.shape[-1])
    arithmetic = torch.float64 if x.dtype == torch.float64 else torch.float32
    logsumexp = layer(x, weight, bias, [], schema.IDENTITY, "logsumexp", False, arithmetic)
    counts = target != ignore_index
    classes = torch.where(counts, target, 0)
    logits = (x.to(arithmetic) * F.embedding(classes, weight).to(arithmetic)).sum(-1)
    if bias is not None:
        logits = logits + bias[classes].to(arithmetic)
    losses = torch.where(counts, logsumexp - logits, 0.0)
    if reduction == "none":
        return losses.to(out_dtype)
    total = losses.sum()
    return (total / counts.sum() if reduction == "mean" else total).to(out_dtype)
