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
_ELEMENT = {SPLIT3: torch.float16, SPLIT6: torch.bfloat16}


class Planes(NamedTuple):
    """Of a matrix `[rows, columns]`."""

    plan: int
    rows: int
    pitch: int  # columns, rounded up to whole blocks
    values: Tensor  # [blocks, planes, rows, columns of a block], flat
    scales: Tensor  # [blocks, rows rounded up]
    flags: Tensor  # int32

    @property
    def addresses(self) -> tuple[int, int]:
        return self.values.data_ptr(), self.scales.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.flags.nbytes


class _Shape(NamedTuple):
    pitch: int
    scale_pitch: int
    flag_count: int
    values_bytes: int
    scales_bytes: int
    flags_bytes: int


@functools.lru_cache(maxsize=4096)
def _shape(rows: int, columns: int, plan: int, transposed: bool) -> _Shape:
    return _Shape(*native.module().planes_shape(rows, columns, plan, transposed))


def pitch_of(columns: int) -> int:
    return _shape(1, columns, SPLIT3, False).pitch


def flag_addresses(flags: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Operands' flags as the binding takes them: addresses and numbers."""
    return [(words.data_ptr(), words.numel()) for words in flags]


def split(matrix: Tensor, plan: int, only_if: Sequence[Tensor] = (), cleared: Tensor | None = None) -> Planes:
    """The planes of `matrix` [rows, columns], fp32 of any strides.

    With `only_if`, those flags decide on the device whether they are computed at all. `cleared`, int32, is filled with
    zeros in the same pass.
    """
    rows, columns = matrix.shape
    row_stride, column_stride = matrix.stride()
    shape = _shape(rows, columns, plan, columns > 1 and column_stride != 1)
    device = matrix.device
    values = torch.empty(shape.values_bytes // 2, dtype=_ELEMENT[plan], device=device)
    scales = torch.empty((shape.scales_bytes // 4 // shape.scale_pitch, shape.scale_pitch), device=device)
    flags = torch.empty(shape.flag_count, dtype=torch.int32, device=device)
    with on_device(device.index):
        native.module().split(
            stream_of(device.index),
            plan,
            matrix.data_ptr(),
            rows,
            columns,
            row_stride,
            column_stride if columns > 1 else 1,
            values.data_ptr(),
            scales.data_ptr(),
            flags.data_ptr(),
            flag_addresses(only_if) or None,
            (0, 0) if cleared is None else (cleared.data_ptr(), cleared.numel()),
        )
    return Planes(plan, rows, shape.pitch, values, scales, flags)


class _Identity(NamedTuple):
    """What changes when a weight does."""

    address: int
    nbytes: int  # of the storage
    version: int
    steps: int  # of optimisers: the fused ones do not change a version


_Key = tuple[int, int, torch.Size, tuple[int, ...]]


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
        ValueError: `fraction` is not between 0 and 1.
    """
    global _fraction
    if not 0 <= fraction <= 1:
        raise ValueError(f"cutfuse: a fraction of the device's memory lies between 0 and 1, got {fraction}")
    if fraction < _fraction:
        forget_planes()
    _fraction = fraction


def plane_memory(device: int | None = None) -> int:
    """Bytes of the planes that weights keep now, on one device or on all."""
    entries = [entry for entry in list(_entries.values()) if device in (None, entry.device)]
    return sum(planes.nbytes for entry in entries for planes in list(entry.planes.values()))


def forget_planes() -> None:
    """Drops all kept planes: for weights that were written through `.data` or behind PyTorch's back."""
    for key in list(_entries):
        _forget(key)


def weight_planes(weight: Tensor, plan: int) -> Planes:
    """The planes of a weight, kept ones where there are."""
    entry = _entry_of(weight)
    if entry is None:
        return split(weight, plan)
    key = plan, stream_of(weight.device.index)
    planes = entry.planes.get(key)
    if planes is None:
        planes = split(weight, plan)
        if _has_room(weight.device.index, planes.nbytes):
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
