"""The derivatives at ties, which changed within the versions of PyTorch that cutfuse supports."""

from __future__ import annotations

from typing import Any

import torch


def _probe() -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones(1, device="cpu", requires_grad=True)
        # The node by itself: autograd's engine would start its threads, for every device.
        node: Any = torch.fmax(one, torch.ones(1, device="cpu", requires_grad=True)).grad_fn
        gradient, _ = node(torch.ones(1, device="cpu"))
        return bool(gradient.item() == 0.5)


_HALVED = _probe()


def ties_are_halved() -> bool:
    """Whether fmax, fmin and clamp with tensor bounds halve the derivative at a tie, and clamp has none at its bounds.

    PyTorch does from 2.14 on, as it always did in maximum and minimum; before, all of it goes to the first argument.
    """
    return _HALVED
