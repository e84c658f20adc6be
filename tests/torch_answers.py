"""What PyTorch itself says, where it has one answer: at ties, zeros of both signs, infinities and NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 6.0, -3.0, 3.0, 0.5, -0.5]

# The same values so that PyTorch's loops are vectorised, and with gaps between them so that they are not. Where the two
# differ, as in the maximum of zeros of both signs and the derivatives of some activations at NaN, there is no answer.
LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda tensor: tensor.repeat(4),
    lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
)


def values(fn: Callable[..., torch.Tensor], arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """fn of the arguments, and where it is the same in every layout, the sign of zero too."""
    results = [fn(*map(layout, arguments))[: len(arguments[0])].to(arguments[0].dtype) for layout in LAYOUTS]
    return results[0], _agreed(*results) & (results[0].signbit() == results[1].signbit())


def derivatives(
    fn: Callable[..., torch.Tensor], arguments: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The derivative by each argument, 0 where there is none, and where it is the same in every layout."""
    both = [_differentiate(fn, [layout(item.detach()) for item in arguments]) for layout in LAYOUTS]
    cut = [[item[: len(arguments[0])] for item in gradients] for gradients in both]
    return [(first, _agreed(first, second)) for first, second in zip(*cut, strict=True)]


def _differentiate(fn: Callable[..., torch.Tensor], arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [item.requires_grad_() for item in arguments]
    result = fn(*leaves)
    if not result.requires_grad:
        return [torch.zeros_like(item) for item in leaves]
    return list(torch.autograd.grad(result.sum(), leaves, materialize_grads=True))


def _agreed(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.isclose(second, rtol=1e-12, atol=0.0, equal_nan=True)
