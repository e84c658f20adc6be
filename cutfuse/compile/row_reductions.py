"""Reductions of the last dimension, in Dynamo's graph."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from .nodes import is_call, name_of, named_arguments, tensor_of
from .products import same

_ARGUMENTS = {"input", "dim", "axis", "keepdim", "dtype"}
_REDUCTIONS = {name: name for name in ("sum", "mean", "amax", "amin", "logsumexp")} | {"max": "amax", "min": "amin"}


def reduction_of(node: fx.Node) -> tuple[str, bool] | None:
    """The reduction of the last dimension that a node computes, and whether it keeps the dimension."""
    name = _REDUCTIONS.get(name_of(node))
    if name is None or not is_call(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if not node.kwargs.keys() <= _ARGUMENTS:
        return None
    source = tensor_of(node.args[0])
    named = named_arguments(node, ("input", "dim", "keepdim"))
    dim, keepdim = named.get("dim", named.get("axis")), named.get("keepdim", False)
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if source is None or source.dim() < 1 or len(dims) != 1 or type(dims[0]) is not int or type(keepdim) is not bool:
        return None
    is_last = dims[0] % source.dim() == source.dim() - 1
    if not is_last or not source.is_floating_point():
        return None
    # Of equal largest elements PyTorch gives one the gradient where it gives indices, and shares it out in amax.
    if name_of(node) in ("max", "min") and source.requires_grad:
        return None
    return (name, keepdim) if _reduced_type_fits(node, source) else None


def _reduced_type_fits(node: fx.Node, source: Tensor) -> bool:
    """Whether the type of the result is one that a kernel stores."""
    dtype = node.kwargs.get("dtype") or source.dtype
    is_wider = dtype is not torch.float64 or source.dtype is torch.float64
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and is_wider and not same(source.shape[-1], 0)
