"""What the splitting kernels have to give is as accurate as they promise, and the sizes of what they write."""

from __future__ import annotations

import math

import pytest
import split_cases as cases
import torch
from hypothesis import given
from hypothesis import strategies as st
from split_cases import BLOCK, SCHEMES
from torch import Tensor

from cutfuse import native

LARGEST = torch.finfo(torch.float32).max


def check(x: Tensor, scheme: int) -> None:
    for is_weight in cases.ROLES:
        split = cases.emulate(x, scheme, is_weight)
        check_accuracy(x, split.values, split.scales, split.out_of_range, scheme)


def check_accuracy(x: Tensor, values: Tensor, scales: Tensor, out_of_range: Tensor, scheme: int) -> None:
    columns = x.shape[1]
    assert (cases.rows_of(values)[:, :, columns:] == 0).all()
    actual = cases.reconstruct(values, scales, x.shape[0])[:, :columns]
    # Split6 keeps 24 bits of all that does not vanish beside its block's largest.
    up = (1 / cases.scales_of_rows(scales, x.shape[0]).T).repeat_interleave(BLOCK, 1)[:, :columns]
    kept = ~out_of_range[:, :columns] if scheme == 3 else (x * up).abs() >= 2.0**-100
    kept &= x.isfinite()
    error = (actual - x.double()).abs()[kept]
    assert (error <= x.double().abs()[kept] * 2.0**-22).all()


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def wide(rows: int, columns: int, octaves: int, seed: int = 0) -> Tensor:
    """Exponents spread evenly over `octaves` up and down."""
    x = random(rows, columns, seed).double()
    exponents = torch.randint(-octaves, octaves + 1, x.shape, generator=torch.Generator().manual_seed(seed + 1))
    return torch.ldexp(x, exponents).float()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "special",
    [0.0, -0.0, 1e-45, -1e-39, 2.0**-126, LARGEST, math.inf, -math.inf, math.nan, 65520.0, 1.9999999, -32767.999],
)
def test_special_values(special: float, scheme: int) -> None:
    check(torch.full((2, 70), special), scheme)
    x = random(5, 200)
    x[3, 77] = special
    check(x, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scale(scheme: int) -> None:
    """A block for each exponent that an fp32 number may have."""
    exponents = torch.arange(-149, 128).unsqueeze(1)
    largest = torch.ldexp(torch.ones(len(exponents), 1, dtype=torch.float64), exponents)
    rest = torch.linspace(-1, 1, 63).round(decimals=3)  # the one in the middle is 0, not 1e-8: out of range
    x = (largest * torch.cat([torch.ones(1), rest])).float()
    check(x, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 300) | st.sampled_from([1000, 4097]),
    octaves=st.integers(0, 40) | st.sampled_from([60, 126, 150]),
    seed=st.integers(0, 1000),
)
def test_any_shape(scheme: int, rows: int, columns: int, octaves: int, seed: int) -> None:
    check(torch.nan_to_num(wide(rows, columns, octaves, seed), posinf=1e38, neginf=-1e38), scheme)


@given(
    rows=st.integers(0, 100000),
    columns=st.integers(0, 100000),
    scheme=st.sampled_from(SCHEMES),
    turned=st.booleans(),
    is_weight=st.booleans(),
)
def test_planes_shape(rows: int, columns: int, scheme: int, turned: bool, is_weight: bool) -> None:
    shape = native.module().planes_shape(rows, columns, scheme, turned, is_weight)
    pitch, scale_pitch, flag_count, *sizes = shape
    assert (pitch, scale_pitch) == (cases.round_up(columns, BLOCK), cases.scale_pitch(rows, scheme, is_weight))
    assert flag_count <= 1056
    assert (flag_count == 0) == (rows == 0 or columns == 0)
    assert sizes == [cases.PLANES[scheme] * rows * pitch * 2, pitch // BLOCK * scale_pitch * 4, flag_count * 4]
