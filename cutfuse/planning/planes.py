"""Splits fp32 matrices into planes, which hold their 16-bit parts (see csrc/split/planes.h)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import native
from .device import on_device, stream_of

Flags = tuple[int, int]  # address and number of words, as the native module takes them


class Planes(NamedTuple):
    """The planes of a weight: values, scales and flags in one piece of memory, with the planner's layout."""

    scheme: int  # a number of native.core.SplitScheme
    memory: Tensor


class PlaneAddresses(NamedTuple):
    """The addresses to which a splitting kernel writes planes."""

    values: int
    scales: int
    flags: int


def split_weight(weight: Tensor, scheme: int) -> Planes:
    """Splits `weight` [rows, columns], an fp32 matrix of any strides, into newly allocated planes."""
    rows, columns = weight.shape
    is_transposed = columns > 1 and weight.stride(1) != 1
    layout = native.core.weight_planes(rows, columns, scheme, is_transposed)
    memory = torch.empty(layout.bytes, dtype=torch.uint8, device=weight.device)
    begin, pieces, index = memory.data_ptr(), layout.pieces, weight.device.index
    to = PlaneAddresses(*(begin + piece.offset for piece in (pieces.values, pieces.scales, pieces.flags)))
    with on_device(index):
        split_matrix(stream_of(index), weight, scheme, to, is_weight=True)
    return Planes(scheme, memory)


def split_matrix(
    stream: int,
    matrix: Tensor,
    scheme: int,
    to: PlaneAddresses,
    is_weight: bool,
    only_if: list[Flags] | None = None,
    cleared: tuple[int, int] = (0, 0),
) -> None:
    """Splits `matrix` on the current device, into planes at the addresses `to`, which have to fit its layout.

    only_if: flags in device memory; if they are given, the kernel runs only if one of them says that split3 would lose
    accuracy. cleared: address and number of words that the kernel sets to zero.
    """
    rows, columns = matrix.shape
    row_stride, column_stride = matrix.stride()
    native.core.split(
        stream,
        scheme,
        is_weight,
        matrix.data_ptr(),
        rows,
        columns,
        row_stride,
        column_stride if columns > 1 else 1,
        *to,
        only_if,
        cleared,
    )
