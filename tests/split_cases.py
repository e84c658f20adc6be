"""Splitting fp32 matrices to planes, as torch operations on the CPU: what the kernels have to give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
SCALE_ROWS = 128
SHARED_ROWS = 16  # of a weight, that share scales in split3
# Elements out of range that a block may not have: of x, and of a weight's blocks, which share their scales.
MANY = {False: 4, True: 8}
OUT_OF_RANGE = 1
NOT_FINITE = 2
SCHEMES = (3, 6)
ROLES = (False, True)  # whether the matrix is a product's weight

# Of each scheme: planes, their type, exponent of a scaled block's largest, lowest and highest exponent.
PLANES = {3: 2, 6: 3}
DTYPES = {3: torch.float16, 6: torch.bfloat16}
_EXPONENTS = {3: (14, -112, 127), 6: (0, -116, 116)}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def rows_of_scale(scheme: int, is_weight: bool) -> int:
    return SHARED_ROWS if is_weight and scheme == 3 else 1


def scale_pitch(rows: int, scheme: int, is_weight: bool) -> int:
    return round_up(rows, SCALE_ROWS) // rows_of_scale(scheme, is_weight)


@dataclass(frozen=True)
class Split:
    values: Tensor  # [blocks, planes, rows, 64] of fp16 or bf16
    scales: Tensor  # [blocks, scale_pitch]
    exponents: Tensor  # [scales, blocks], of each block's largest
    out_of_range: Tensor  # [rows, pitch]
    is_weight: bool

    @property
    def flags(self) -> int:
        """Of one thread block that takes the whole matrix, but for what is not finite."""
        blocks = self.out_of_range.unflatten(1, (-1, BLOCK)).sum(-1)
        lossy = bool((blocks >= MANY[self.is_weight]).any() or (self.exponents.abs() > 60).any())
        return OUT_OF_RANGE if lossy else 0


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def emulate(x: Tensor, scheme: int, is_weight: bool = False) -> Split:
    """`x` is a matrix on the CPU."""
    rows, columns = x.shape
    pitch = round_up(columns, BLOCK)
    padded = torch.nn.functional.pad(x, (0, pitch - columns))
    finite = padded.isfinite()
    blocks = torch.where(finite, padded, 0.0).abs().unflatten(1, (-1, BLOCK))
    sharing = rows_of_scale(scheme, is_weight)
    largest = torch.nn.functional.pad(blocks.amax(-1), (0, 0, 0, -rows % sharing)).unflatten(0, (-1, sharing)).amax(1)
    exponents = torch.where(largest > 0, torch.frexp(largest).exponent - 1, 0)
    top, lowest, highest = _EXPONENTS[scheme]
    clamped = exponents.clamp(lowest, highest).long()
    up = _power_of_two(top - clamped).repeat_interleave(sharing, 0)[:rows]
    scaled = (padded.unflatten(1, (-1, BLOCK)) * up.unsqueeze(-1)).flatten(1)
    if scheme == 6:
        least = torch.copysign(torch.tensor(2.0**-133), padded)
        scaled = torch.where((scaled.abs() < 2.0**-133) & (padded != 0), least, scaled)
    parts = [scaled.to(DTYPES[scheme])]
    rest = scaled
    for _ in range(PLANES[scheme] - 1):
        rest = torch.where(finite, rest - parts[-1].float(), 0.0)
        parts.append(rest.to(DTYPES[scheme]))
    scales = torch.ones(pitch // BLOCK, scale_pitch(rows, scheme, is_weight))
    scales[:, : len(clamped)] = _power_of_two(clamped - top).T
    out_of_range = (padded != 0) & (scaled.abs() < 2**-3) & torch.tensor(scheme == 3)
    if scheme != 3:
        exponents = torch.zeros_like(exponents)
    values = torch.stack(parts).unflatten(2, (-1, BLOCK)).permute(2, 0, 1, 3).contiguous()
    return Split(values, scales, exponents, out_of_range, is_weight)


def expected_flags(x: Tensor, scheme: int, is_weight: bool = False) -> int:
    """Of a matrix whose elements out of range are few or many wherever one looks."""
    split = emulate(x, scheme, is_weight)
    flags = split.flags
    if split.out_of_range.sum() * 256 > x.numel():
        flags |= OUT_OF_RANGE
    if not x.isfinite().all():
        flags |= NOT_FINITE | (OUT_OF_RANGE if scheme == 3 else 0)
    return flags


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Bit for bit, but for which NaN it is."""
    assert actual.shape == expected.shape
    integer = torch.int16 if actual.dtype.itemsize == 2 else torch.int32
    same = (actual.view(integer) == expected.view(integer)) | (actual.isnan() & expected.isnan())
    wrong = (~same).nonzero()
    assert not wrong.numel(), (
        f"{len(wrong)} of {actual.numel()} wrong, first at {wrong[0].tolist()}: {actual[tuple(wrong[0])]} for "
        f"{expected[tuple(wrong[0])]}"
    )
