"""The error of a contender's result against fp64, over the whole result."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.workloads import Reference

# A result this far off is wrong, not imprecise: by type of the data, well above what rounding explains.
WRONG_ABOVE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 5e-2, "fp16": 1e-2}


def relative_error(result: Tensor, reference: Reference) -> float:
    """The Frobenius norm of `result` minus the reference over the reference's; infinite where one is not a number.

    Raises ValueError where the shapes differ.
    """
    difference = torch.zeros((), dtype=torch.float64, device=result.device)
    norm = torch.zeros_like(difference)
    for start in range(0, reference.rows, reference.step):
        stop = min(start + reference.step, reference.rows)
        expected = reference.compute(start, stop)
        piece = result[start:stop]
        if piece.shape != expected.shape or result.shape[0] != reference.rows:
            raise ValueError(
                f"the result has shape {tuple(result.shape)}, but its rows {start}:{stop} should be of shape "
                f"{tuple(expected.shape)} out of {reference.rows} rows"
            )
        difference += (piece.double() - expected).square_().sum()
        norm += expected.square().sum()
    error = (difference / norm).sqrt().item() if norm.item() else difference.sqrt().item()
    return error if math.isfinite(error) else math.inf


def frobenius_error(result: Tensor, exact: Tensor) -> float:
    """The Frobenius norm of the difference over that of `exact`; infinite where there is a difference to nothing."""
    norm, difference = exact.norm().item(), (result.double() - exact).norm().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else math.inf if difference else 0.0


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2
