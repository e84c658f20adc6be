"""Checks of a chain's result that a relative error over all of it would pass: one bad tile, or memory never written."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bench.accuracy import relative_error
from bench.workloads import Reference

# A row or column whose own norm is small is held to this share of the rows' or columns' mean.
LEAST_SHARE = 0.1
# More than the contenders before have left of free memory of this size.
SPARE_RESULTS = 4


def poison(result: Any) -> None:
    """Fill a call's result with NaN, and spare memory of its size: the allocator hands one of them out next."""
    for part in result if isinstance(result, tuple) else (result,):
        spare = [torch.empty_like(part) for _ in range(SPARE_RESULTS)]
        for memory in (part.detach(), *spare):
            memory.fill_(torch.nan)


def worst_ratio(differences: Tensor, norms: Tensor) -> float:
    """The largest relative error, of squared norms."""
    least = LEAST_SHARE**2 * norms.mean()
    error = (differences / norms.clamp_min(least)).max().sqrt().item()
    return error if math.isfinite(error) else math.inf


def worst_line_error(result: Tensor, reference: Reference) -> float:
    """The relative error of the worst row or column of a matrix: a wrong tile of 64 columns stands out in its rows.

    Of anything else it is the error of the whole.
    """
    if result.dim() != 2:
        return relative_error(result, reference)
    columns = [torch.zeros(result.shape[1], dtype=torch.float64, device=result.device) for _ in range(2)]
    rows: list[list[Tensor]] = [[], []]
    for start in range(0, reference.rows, reference.step):
        stop = min(start + reference.step, reference.rows)
        expected = reference.compute(start, stop)
        squares = (result[start:stop].double() - expected).square(), expected.square()
        for own, column, square in zip(rows, columns, squares, strict=True):
            own.append(square.sum(1))
            column += square.sum(0)
    by_row = worst_ratio(*(torch.cat(own) for own in rows))
    return max(by_row, worst_ratio(*columns))
