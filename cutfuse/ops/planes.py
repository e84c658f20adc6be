"""The planes of an fp32 weight, 16-bit parts of it (csrc/split/planes.h), in memory of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import native
from .device import on_device, stream_of

Flags = tuple[int, int]  # address and number of words, as the binding takes them


class Planes(NamedTuple):
    """Of a weight: values, scales and flags, laid out as the planner says."""

    scheme: int  # of native.core.SplitScheme
    memory: Tensor


class PlaneAddresses(NamedTuple):
    """Where a pass writes planes."""

    values: int
    scales: int
    flags: int


def split_weight(weight: Tensor, scheme: int) -> Planes:
    """The planes of `weight` [rows, columns], fp32 of any strides."""
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
    """Splits `matrix` into planes at addresses that its layout fits, on the current device.

    With `only_if`, those flags decide on the device whether it does at all. `cleared`, address and number of words, are
    set to zero in the same pass.
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
