"""An fp32 matrix as planes of 16-bit parts (csrc/split/planes.h)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import native
from .device import on_device, stream_of

SPLIT3 = 3
SPLIT6 = 6
PART = 256  # bytes: where a part of a piece of memory may begin

Flags = tuple[int, int]  # address and number of words, as the binding takes them


class Placed(NamedTuple):
    """Addresses of the planes of a matrix."""

    values: int  # [blocks, planes, rows, columns of a block]
    scales: int  # [blocks, rows rounded up, of a weight in SPLIT3 a sixteenth]
    flags: Flags

    @property
    def parts(self) -> tuple[int, int]:
        """What a product reads."""
        return self.values, self.scales


class Layout(NamedTuple):
    """The memory of a matrix's planes, in bytes; both parts begin at multiples of `PART`."""

    pitch: int  # columns, rounded up to whole blocks
    scales: int  # where they begin, after the values
    nbytes: int  # of values and scales
    flag_count: int
    flag_bytes: int

    def placed(self, address: int, flags: int) -> Placed:
        """With values at `address` and flags where they are said to be."""
        return Placed(address, address + self.scales, (flags, self.flag_count))


class Planes(NamedTuple):
    """Of a matrix, in memory of their own: values, scales and flags."""

    plan: int  # SPLIT3 or SPLIT6
    layout: Layout
    memory: Tensor

    @property
    def placed(self) -> Placed:
        address = self.memory.data_ptr()
        return self.layout.placed(address, address + self.layout.nbytes)


def aligned(nbytes: int) -> int:
    """Rounded up to where another part may begin."""
    return -(-nbytes // PART) * PART


@functools.lru_cache(maxsize=4096)
def layout_of(rows: int, columns: int, plan: int, transposed: bool, is_weight: bool) -> Layout:
    """Of the planes of a matrix [rows, columns]: x or, with `is_weight`, a product's second operand.

    `transposed` is what `is_transposed` says.
    """
    pitch, _, count, values, scales, flags = native.core.planes_shape(rows, columns, plan, transposed, is_weight)
    return Layout(pitch, aligned(values), aligned(values) + aligned(scales), count, aligned(flags))


def is_transposed(matrix: Tensor) -> bool:
    """Whether neighbours in a row are not neighbours in memory."""
    return matrix.shape[1] > 1 and matrix.stride(1) != 1


def pitch_of(columns: int) -> int:
    return layout_of(1, columns, SPLIT3, False, False).pitch


def split_weight(weight: Tensor, plan: int) -> Planes:
    """The planes of `weight` [rows, columns], fp32 of any strides."""
    layout = _layout_of_weight(weight, plan)
    memory = torch.empty(layout.nbytes + layout.flag_bytes, dtype=torch.uint8, device=weight.device)
    planes = Planes(plan, layout, memory)
    write_planes(weight, plan, planes.placed, is_weight=True)
    return planes


def planes_in(memory: Tensor, weight: Tensor, plan: int) -> Planes:
    """The planes that `split_weight` made of `weight`, by their memory."""
    return Planes(plan, _layout_of_weight(weight, plan), memory)


def _layout_of_weight(weight: Tensor, plan: int) -> Layout:
    return layout_of(*weight.shape, plan, is_transposed(weight), True)


def write_planes(
    matrix: Tensor,
    plan: int,
    to: Placed,
    *,
    is_weight: bool,
    only_if: Sequence[Flags] = (),
    cleared: tuple[int, int] = (0, 0),
) -> None:
    """Splits `matrix` into planes at addresses that its layout fits.

    With `only_if`, those flags decide on the device whether it does at all. `cleared`, address and number of words, are
    set to zero in the same pass.
    """
    rows, columns = matrix.shape
    row_stride, column_stride = matrix.stride()
    index = matrix.device.index
    with on_device(index):
        native.core.split(
            stream_of(index),
            plan,
            is_weight,
            matrix.data_ptr(),
            rows,
            columns,
            row_stride,
            column_stride if columns > 1 else 1,
            to.values,
            to.scales,
            to.flags[0],
            list(only_if) or None,
            cleared,
        )
