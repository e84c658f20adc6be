"""The host's splitting of fp32 matrices, which shares its arithmetic with the kernels, against torch operations."""

from __future__ import annotations

import math

import pytest
import split_cases as cases
import torch
from hypothesis import given
from hypothesis import strategies as st
from split_cases import BLOCK, NOT_FINITE, OUT_OF_RANGE, SCHEMES
from torch import Tensor

from cutfuse import native

LARGEST = torch.finfo(torch.float32).max


def split_on_host(x: Tensor, scheme: int, is_weight: bool = False) -> tuple[Tensor, Tensor, int]:
    rows, columns = x.shape
    pitch = cases.round_up(columns, BLOCK)
    values = torch.full((pitch // BLOCK, cases.PLANES[scheme], rows, BLOCK), -77.0, dtype=cases.DTYPES[scheme])
    scales = torch.full((pitch // BLOCK, cases.scale_pitch(rows, scheme, is_weight)), -77.0)
    x = x.contiguous()
    module = native.module()
    flags = module.split_reference(x.data_ptr(), rows, columns, scheme, is_weight, values.data_ptr(), scales.data_ptr())
    return values, scales, flags


def check(x: Tensor, scheme: int) -> None:
    for is_weight in cases.ROLES:
        values, scales, flags = split_on_host(x, scheme, is_weight)
        expected = cases.emulate(x, scheme, is_weight)
        cases.assert_same_bits(values, expected.values)
        cases.assert_same_bits(scales, expected.scales)
        assert flags == cases.expected_flags(x, scheme, is_weight)
        check_accuracy(x, values, scales, expected.out_of_range, scheme)


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
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (130, 1000), (129, 65), (2, 4097)], ids=str)
def test_split(shape: tuple[int, int], scheme: int) -> None:
    check(random(*shape), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("octaves", [5, 20, 60, 126, 150])
def test_wide_range(octaves: int, scheme: int) -> None:
    check(torch.nan_to_num(wide(33, 200, octaves), posinf=1e38, neginf=-1e38), scheme)


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
    for row in range(len(x)):
        extreme = abs(int(exponents[row])) > 60
        assert split_on_host(x[row : row + 1], scheme)[2] == (OUT_OF_RANGE if scheme == 3 and extreme else 0)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 300),
    octaves=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_any_shape(scheme: int, rows: int, columns: int, octaves: int, seed: int) -> None:
    check(wide(rows, columns, octaves, seed), scheme)


def with_small(blocks: int, small: int, value: float) -> Tensor:
    """A row of ones with `small` elements of `value` at the start of its second block."""
    x = torch.ones(1, blocks * BLOCK)
    x[0, BLOCK : BLOCK + small] = value
    return x


def flags_of(x: Tensor, scheme: int = 3) -> int:
    return split_on_host(x, scheme)[2]


def test_out_of_range_in_a_block() -> None:
    assert flags_of(with_small(16, 3, 2.0**-18)) == 0
    assert flags_of(with_small(16, 4, 2.0**-18)) == OUT_OF_RANGE
    assert flags_of(with_small(16, 64, 2.0**-18)) == 0, "a block of its own"
    assert flags_of(with_small(16, 40, 2.0**-17)) == 0, "17 octaves are in range"
    assert flags_of(with_small(16, 40, math.nextafter(2.0**-17, 0) * (1 - 1e-7))) == OUT_OF_RANGE
    assert flags_of(with_small(16, 40, 0.0)) == 0
    assert flags_of(with_small(16, 40, 2.0**-18), scheme=6) == 0


def test_a_weights_rows_share_scales() -> None:
    """Rows far below their neighbours: of a weight they are out of range, unless they are sixteen of their own."""
    x = torch.ones(48, BLOCK)
    for rows, flags in ((slice(5, 6), OUT_OF_RANGE), (slice(16, 32), 0), (slice(17, 32), OUT_OF_RANGE)):
        x.fill_(1.0)[rows] = 2.0**-18
        assert split_on_host(x, 3)[2] == 0
        assert split_on_host(x, 3, is_weight=True)[2] == flags
        assert split_on_host(x, 6, is_weight=True)[2] == 0


@pytest.mark.parametrize("is_weight", cases.ROLES)
def test_out_of_range_in_a_block_of_a_role(is_weight: bool) -> None:
    many = cases.MANY[is_weight]
    x = torch.ones(16, 16 * BLOCK)
    x[3, BLOCK : BLOCK + many - 1] = 2.0**-18
    assert split_on_host(x, 3, is_weight)[2] == 0
    x[3, 2 * BLOCK - 1] = 2.0**-18
    assert split_on_host(x, 3, is_weight)[2] == OUT_OF_RANGE


def test_out_of_range_among_all() -> None:
    assert flags_of(with_small(4, 1, 1e-45)) == 0, "1 of 256"
    assert flags_of(with_small(4, 1, 1e-45)[:, :-1]) == OUT_OF_RANGE, "1 of 255: padding does not count"
    assert flags_of(with_small(8, 2, 1e-45)) == 0
    assert flags_of(with_small(8, 3, 1e-45)) == OUT_OF_RANGE


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_not_finite(value: float) -> None:
    x = random(70, 300)
    assert flags_of(x) == flags_of(x, 6) == 0
    x[69, 299] = value
    assert flags_of(x) == NOT_FINITE | OUT_OF_RANGE
    assert flags_of(x, 6) == NOT_FINITE


def test_bad_arguments() -> None:
    split = native.module().split_reference
    with pytest.raises(ValueError, match="scheme has to be 3 or 6, got 4"):
        split(0, 1, 1, 4, False, 0, 0)
    with pytest.raises(ValueError, match=r"null pointers for \(2, 5\)"):
        split(0, 2, 5, 3, False, 0, 0)
    with pytest.raises(ValueError, match=r"at least 0, got \(-2, 5\)"):
        split(0, -2, 5, 3, False, 0, 0)


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
