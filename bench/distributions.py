"""Pairs of fp32 matrices on which products are held against fp64: what makes rounding, or a splitting, easy or hard.

Each makes x `[M, K]` and weight `[N, K]`, whose product is `x @ weight.T`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_INTEGER = 2**11 - 1
LARGEST_SUM = 2**24 - 1  # fp32 holds every integer up to this one
HUGE_ROWS = 64  # one row in so many is huge
CANCELLED_TO = 1e-4  # of the sum of the terms' absolute values


@dataclass(frozen=True)
class Draw:
    """Random fp64 numbers of one stream on one device."""

    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """Of mean 0 and variance 1."""
        return torch.randn(shape, dtype=torch.float64, device=self.generator.device, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1)."""
        return torch.rand(shape, dtype=torch.float64, device=self.generator.device, generator=self.generator)

    def integers(self, largest: int, *shape: int) -> Tensor:
        """From -largest to largest."""
        return (self.uniform(*shape) * (2 * largest + 1)).floor() - largest


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Distribution:
    """`make(draw, m, n, k)` gives x and weight in fp64, still to be rounded to fp32.

    `is_exact`: every product and partial sum is a multiple of one number and fits fp32, so a result has no error.
    """

    name: str
    make: Callable[[Draw, int, int, int], Pair]
    is_exact: bool = False

    def sample(self, m: int, n: int, k: int, device: torch.device, seed: int = 0) -> Pair:
        """x `[m, k]` and weight `[n, k]` in fp32; no two distributions draw the same numbers."""
        generator = torch.Generator(device).manual_seed(seed + zlib.crc32(self.name.encode()))
        x, weight = self.make(Draw(generator), m, n, k)
        return x.float(), weight.float()


def powers_of_two(exponents: Tensor) -> Tensor:
    """2 to the whole-numbered exponents, exactly."""
    return torch.ldexp(torch.ones_like(exponents), exponents.int())


def octaves(reach: int, count: int, device: torch.device) -> Tensor:
    """2^-reach to 2^reach in `count` even steps, rounded to powers of two."""
    return powers_of_two(torch.linspace(-reach, reach, count, dtype=torch.float64, device=device).round())


def log_normal(sigma: float) -> Callable[[Draw, int, int, int], Pair]:
    """exp(sigma * normal) with random signs."""

    def one(draw: Draw, rows: int, k: int) -> Tensor:
        return (sigma * draw.normal(rows, k)).exp().copysign(draw.uniform(rows, k) - 0.5)

    return lambda draw, m, n, k: (one(draw, m, k), one(draw, n, k))


def scaled_columns(scales: Callable[[Draw, int], Tensor]) -> Callable[[Draw, int, int, int], Pair]:
    """Normal values; column k of x times a scale `[K]`, column k of weight divided by it."""

    def make(draw: Draw, m: int, n: int, k: int) -> Pair:
        scale = scales(draw, k)
        return draw.normal(m, k) * scale, draw.normal(n, k) / scale

    return make


def smooth_scales(draw: Draw, k: int) -> Tensor:
    """From 2^-20 to 2^20 along K."""
    return octaves(20, k, draw.generator.device)


def random_scales(reach: int) -> Callable[[Draw, int], Tensor]:
    """Powers of two between 2^-reach and 2^reach, each as likely."""
    return lambda draw, k: powers_of_two(draw.integers(reach, k))


def outliers(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Normal values, 2% of x times 1e4."""
    return draw.normal(m, k) * torch.where(draw.uniform(m, k) < 0.02, 1e4, 1.0), draw.normal(n, k)


def scaled_rows(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Normal values, row m of x times a scale from 2^-40 to 2^40."""
    return draw.normal(m, k) * octaves(40, m, draw.generator.device)[:, None], draw.normal(n, k)


def huge_rows(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Normal values, every `HUGE_ROWS`th row of x times 2^90."""
    scale = torch.ones(m, 1, dtype=torch.float64, device=draw.generator.device)
    scale[::HUGE_ROWS] = 2.0**90
    return draw.normal(m, k) * scale, draw.normal(n, k)


def cancelling(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Normal values whose sums are about `CANCELLED_TO` of the sums of their absolute values.

    For each column of x there is one that is nearly the same and meets the opposite column of weight, somewhere along
    K. What is left of a pair is `apart` of a product, and of a whole sum `apart` * sqrt(K / 2), while the absolute
    values' sum is K * 2 / pi.
    """
    half = k // 2
    apart = CANCELLED_TO * 2 / math.pi * math.sqrt(2 * k)
    x, weight = draw.normal(m, half), draw.normal(n, half)
    twin = x + apart * draw.normal(m, half)
    odd = k - 2 * half
    order = draw.uniform(k).argsort()
    return (
        torch.cat([x, twin, apart * draw.normal(m, odd)], dim=1)[:, order],
        torch.cat([weight, -weight, draw.normal(n, odd)], dim=1)[:, order],
    )


def integers(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Integers below 2^11, weight's small enough that no sum of absolute values reaches 2^24."""
    of_weight = max(1, LARGEST_SUM // (k * LARGEST_INTEGER))
    of_x = min(LARGEST_INTEGER, LARGEST_SUM // (k * of_weight))
    return draw.integers(of_x, m, k), draw.integers(of_weight, n, k)


def denormals(draw: Draw, m: int, n: int, k: int) -> Pair:
    """x of multiples of 2^-149 below 2^-126, weight normal."""
    return draw.integers(2**23 - 1, m, k) * 2.0**-149, draw.normal(n, k)


DISTRIBUTIONS = (
    Distribution("normal", lambda draw, m, n, k: (draw.normal(m, k), draw.normal(n, k))),
    Distribution("uniform positive x positive", lambda draw, m, n, k: (draw.uniform(m, k), draw.uniform(n, k))),
    Distribution("uniform positive x centred", lambda draw, m, n, k: (draw.uniform(m, k), draw.uniform(n, k) - 0.5)),
    Distribution("log-normal, sigma 1", log_normal(1.0)),
    Distribution("log-normal, sigma 4", log_normal(4.0)),
    Distribution("columns 2^-20..2^20 smoothly", scaled_columns(smooth_scales)),
    Distribution("columns 2^+-8 at random", scaled_columns(random_scales(8))),
    Distribution("columns 2^+-20 at random", scaled_columns(random_scales(20))),
    Distribution("2% outliers x 1e4", outliers),
    Distribution("rows 2^-40..2^40", scaled_rows),
    Distribution("a few huge rows", huge_rows),
    Distribution("sums that cancel", cancelling),
    Distribution("integers below 2^11", integers, is_exact=True),
    Distribution("denormal x normal", denormals),
    Distribution("tiny x tiny", lambda draw, m, n, k: (draw.normal(m, k) * 2.0**-70, draw.normal(n, k) * 2.0**-70)),
)

BY_NAME = {distribution.name: distribution for distribution in DISTRIBUTIONS}
