"""Layers of their own, by a seed, and what PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse

KINDS = ["linear", "pointwise", "reduce", "training"]


def call_of(kind: str, seed: int = 0) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A call of a layer of its own, and what PyTorch makes of it."""
    rows, columns, depth, scale = 2 + seed % 5, 8 + 8 * (seed % 3), 16 + 8 * (seed % 7), float(1 + seed)
    x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    if kind == "linear":
        return (
            lambda: cutfuse.linear(x, weight, epilogue=lambda z: torch.relu(z) * scale),
            lambda: torch.relu(F.linear(x, weight)) * scale,
        )
    if kind == "pointwise":
        return lambda: cutfuse.pointwise(lambda z: torch.tanh(z) + scale, x), lambda: torch.tanh(x) + scale
    if kind == "reduce":
        return lambda: cutfuse.reduce(x, -1, "sum", prologue=lambda z: z * scale), lambda: (x * scale).sum(-1)
    trained = weight.requires_grad_()

    def gradient(y: Tensor) -> Tensor:
        return torch.autograd.grad(y.sum(), trained)[0]

    return (
        lambda: gradient(cutfuse.linear(x, trained, epilogue=lambda z: torch.sigmoid(z) * scale)),
        lambda: gradient(torch.sigmoid(F.linear(x, trained)) * scale),
    )
