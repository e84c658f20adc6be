"""An fp32 matrix as planes of 16-bit parts (csrc/split/planes.h), and weights that keep theirs between calls.

Nothing is kept unless `set_plane_memory` allows it: keeping a weight's planes saves the pass that splits it, for as
much memory as the weight takes (half as much again for split6), on each stream and in each layout. They are kept from
the second call on in which the same tensor was unchanged, outside of CUDA graph captures, and dropped with the tensor.
A change is seen by the tensor's version, by its storage, and by an optimiser's step. Writes through `.data`, by
`torch.distributed`'s broadcast and all_reduce, by a CUDA graph's replay, or by something that PyTorch does not know of,
are not seen: call `forget_planes` after them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

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
    layout = layout_of(*weight.shape, plan, is_transposed(weight), True)
    memory = torch.empty(layout.nbytes + layout.flag_bytes, dtype=torch.uint8, device=weight.device)
    planes = Planes(layout, memory)
    write_planes(weight, plan, planes.placed, is_weight=True)
    return planes


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


class _Identity(NamedTuple):
    """What changes when a weight does."""

    address: int
    nbytes: int  # of the storage
    version: int
    steps: int  # of optimisers: the fused ones do not change a version


_Key = tuple[int, int | torch.SymInt, torch.Size, tuple[int, ...]]


class _Entry:
    """A weight that was seen, and its planes once they are kept."""

    def __init__(self, weight: Tensor) -> None:
        self.device = weight.device.index
        self.identity = _identity(weight)
        self.planes: dict[tuple[int, int], Planes] = {}  # by plan and stream
        # Of the storage, not of the tensor: a tensor with weak references cannot be swapped.
        self.finalizer = weakref.finalize(weight.untyped_storage(), _entries.pop, _key(weight), None)


_entries: dict[_Key, _Entry] = {}
_fraction = 0.0
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


@functools.lru_cache(maxsize=1)
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count_step)


def set_plane_memory(fraction: float) -> None:
    """Lets weights keep planes of up to `fraction` of their device's memory together (0 at first: none).

    Raises:
        TypeError: `fraction` is not a number.
        ValueError: it is not between 0 and 1.
    """
    global _fraction
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(
            f"cutfuse.set_plane_memory: fraction has to be a number between 0 and 1, got {fraction!r} of type "
            f"{type(fraction).__name__}"
        )
    if not 0 <= fraction <= 1:
        raise ValueError(f"cutfuse: a fraction of the device's memory lies between 0 and 1, got {fraction}")
    if fraction < _fraction:
        forget_planes()
    _fraction = fraction


def plane_memory(device: int | None = None) -> int:
    """Bytes of the planes that weights keep now, on the device of an index or on all."""
    if device is not None and not isinstance(device, int):
        raise TypeError(f"cutfuse.plane_memory: device has to be a CUDA device's index or None, got {device!r}")
    entries = [entry for entry in list(_entries.values()) if device in (None, entry.device)]
    return sum(planes.memory.nbytes for entry in entries for planes in list(entry.planes.values()))


def forget_planes() -> None:
    """Drops all kept planes: for weights that were written through `.data` or behind PyTorch's back."""
    for key in list(_entries):
        _forget(key)


def weight_planes(weight: Tensor, plan: int) -> Planes:
    """The planes of a weight, kept ones where there are."""
    entry = _entry_of(weight)
    if entry is None:
        return split_weight(weight, plan)
    key = plan, stream_of(weight.device.index)
    planes = entry.planes.get(key)
    if planes is None:
        planes = split_weight(weight, plan)
        if _has_room(weight.device.index, planes.memory.nbytes):
            entry.planes[key] = planes
    return planes


def note_weight(weight: Tensor) -> None:
    """Takes note of a weight that a call has used without its planes, so that the next may keep them."""
    _entry_of(weight)


def keeps_planes(weight: Tensor, plan: int) -> bool:
    """Whether a call now would find the weight's planes, or keep those that it makes."""
    if not _may_keep(weight):
        return False
    entry = _entries.get(_key(weight))
    if entry is None or entry.identity != _identity(weight):
        return False
    kept = (plan, stream_of(weight.device.index)) in entry.planes
    return kept or _has_room(weight.device.index, weight.nbytes * 3 // 2)


def _may_keep(weight: Tensor) -> bool:
    # A graph would go on with the planes of the weight as it was when it was captured.
    return _fraction > 0 and not weight.is_inference() and not torch.cuda.is_current_stream_capturing()


def _has_room(device: int, nbytes: int) -> bool:
    return plane_memory(device) + nbytes <= _fraction * _device_memory(device)


def _key(weight: Tensor) -> _Key:
    return weight.untyped_storage()._cdata, weight.storage_offset(), weight.shape, weight.stride()


def _identity(weight: Tensor) -> _Identity:
    storage = weight.untyped_storage()
    return _Identity(storage.data_ptr(), storage.nbytes(), weight._version, _optimizer_steps)


def _entry_of(weight: Tensor) -> _Entry | None:
    """The entry of a weight that was seen before as it is now; notes it otherwise."""
    if not _may_keep(weight):
        return None
    _watch_optimizers()
    key = _key(weight)
    entry = _entries.get(key)
    if entry is not None and entry.identity == _identity(weight):
        return entry
    _forget(key)
    _entries[key] = _Entry(weight)
    return None


def _forget(key: _Key) -> None:
    entry = _entries.pop(key, None)
    if entry is not None:
        entry.finalizer.detach()


@functools.lru_cache(maxsize=64)
def _device_memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).total_memory
