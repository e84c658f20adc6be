"""Whether a layer computes `F.linear(x, weight, bias)`, so that its weight and bias say all of it and can be shared."""

from __future__ import annotations

from typing import Any

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_plain(layer: nn.Module) -> bool:
    """Not of an adapter around the layer, or of one of 8 bits in its place, or of one with hooks."""
    if type(layer).forward is not nn.Linear.forward or "forward" in layer.__dict__:
        return False
    return not (layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks)


def why_not_plain(layer: nn.Module) -> str:
    """For messages; empty where it is plain. Dynamo need not trace it."""
    if is_plain(layer):
        return ""
    kind = type(layer).__name__
    hooks = [hook for name in _HOOKS for hook in getattr(layer, name).values()]
    if not hooks:
        return f"{kind} has a forward of its own"
    names = [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]
    return f"{kind} has hooks: {', '.join(names)}"


def check_is_linear(kind_made: str, linear: Any) -> None:
    """Raises where another layer, made by `from_linear`, cannot have its parameters and compute what it does."""
    function, kind = f"{kind_made}.from_linear", type(linear).__name__
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"cutfuse.{function}: linear has to be an nn.Linear, got {kind}")
    reason = why_not_plain(linear)
    if reason:
        raise ValueError(
            f"cutfuse.{function}: {reason}, which the new layer would not run; give it an nn.Linear without that"
        )
    for name in ("weight", "bias"):
        if name not in linear._parameters:
            raise ValueError(
                f"cutfuse.{function}: the {name} of {kind} is computed and no parameter to share; remove its "
                "parametrization first, by torch.nn.utils.parametrize.remove_parametrizations"
            )
