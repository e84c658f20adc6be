"""What kernels need to know of devices and tensors: facts, codes of types, and layouts of three dimensions.

Nothing of a device is read before the first call. Layouts are computed of sizes and strides, and kept.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dynamo, native
from ..native import DeviceFacts, address_of, predicted_facts

NOT_CUDA: DeviceFacts = (0, 0, 0)

_NOTHING = contextlib.nullcontext()
ALIGNMENT = 16  # bytes that kernels load at once, and the copy engine's boundary


def stream_of(index: int) -> int:
    """The current stream's handle. Read inside an operator's implementation, never while tracing."""
    return torch.cuda.current_stream(index).cuda_stream


def on_device(index: int) -> contextlib.AbstractContextManager[object]:
    """A context in which device `index` is current. If it already is, this costs one comparison."""
    return _NOTHING if index == torch.cuda.current_device() else torch.cuda.device(index)


@functools.lru_cache(maxsize=64)
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def device_facts(device: torch.device) -> DeviceFacts:
    """What the planner needs to know of a device, or of the card that is predicted for in its place."""
    return _cuda_device_facts(device.index) if device.type == "cuda" else predicted_facts() or NOT_CUDA


@functools.lru_cache(maxsize=64)
def _cuda_device_facts(index: int) -> DeviceFacts:
    return *torch.cuda.get_device_capability(index), multiprocessors(index)


def times_of(device: torch.device) -> str:
    """The card by whose table a CUDA device is planned: itself, or the nearest that has one. Empty elsewhere."""
    return _cuda_times(device.index or 0) if device.type == "cuda" else ""


@functools.lru_cache(maxsize=64)
def _cuda_times(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    # Of PyTorch's that has them: kHz of a memory that moves twice a cycle, and bits.
    bits = 2e3 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0)
    return nearest_table(properties.name, properties.multi_processor_count, bits / 8e9)


def nearest_table(name: str, multiprocessors: int, gigabytes_per_second: float) -> str:
    """The card of that name if it has a table, or the one that differs least by the factors between both figures.

    gigabytes_per_second: of memory; 0 where it is unknown.
    """
    tables = native.core.device_times()

    def difference(card: str) -> float:
        own_multiprocessors, own_gigabytes, _ = tables[card]
        of_memory = abs(math.log(gigabytes_per_second / own_gigabytes)) if gigabytes_per_second else 0.0
        return abs(math.log(multiprocessors / own_multiprocessors)) + of_memory

    return name if name in tables else min(tables, key=difference)


def caution_of(device: torch.device) -> str:
    """What is to be said where a device with fused kernels is planned by another card's table; empty elsewhere."""
    card = times_of(device)
    if not card or native.core.why_no_kernels(device_facts(device)):
        return ""
    name = torch.cuda.get_device_properties(device).name
    return "" if name == card else f"planned by the times of an {card}, the nearest card that has a table"


@functools.lru_cache(maxsize=1)
def dtype_codes() -> dict[torch.dtype, int]:
    return {getattr(torch, name): code for name, code in native.core.dtypes().items()}


@functools.lru_cache(maxsize=1)
def reduction_codes() -> dict[str, int]:
    return {"none": 0, **native.core.reductions()}


def aligned_rows(matrix: Tensor) -> Tensor:
    """A matrix whose rows are contiguous and begin at multiples of 16 bytes: itself or a copy with gaps behind them.

    While torch.compile traces there is no memory: a matrix is taken to begin at such a multiple.
    """
    (rows, columns), (pitch, step) = matrix.shape, matrix.stride()
    vector = ALIGNMENT // matrix.element_size()
    begins_aligned = dynamo.is_tracing() or address_of(matrix) % ALIGNMENT == 0
    are_aligned = begins_aligned and (rows <= 1 or pitch % vector == 0)
    if are_aligned and (step == 1 or columns <= 1):
        return matrix
    gap = -columns % vector
    return F.pad(matrix, (0, gap))[:, :columns] if gap else matrix.clone(memory_format=torch.contiguous_format)


Sizes = tuple[int, ...]
MAX_DIMENSIONS = 3


class MergedLayout(NamedTuple):
    """Three extents, outermost first, and for each tensor its three strides in elements."""

    extents: Sizes
    strides: tuple[Sizes, ...]


class ReductionLayout(NamedTuple):
    """Extents (outer, reduced, inner), and how a result of (outer, inner) is permuted to the dimensions' order."""

    extents: Sizes
    strides: tuple[Sizes, ...]
    result_shape: Sizes
    result_sizes: Sizes  # the kept dimensions of more than one element, in the order of (outer, inner)
    result_order: Sizes | None  # the permutation of these; None if they are in order


def shapes_and_strides(tensors: Sequence[Tensor]) -> tuple[tuple[Sizes, ...], tuple[Sizes, ...]]:
    return tuple([t.shape for t in tensors]), tuple([t.stride() for t in tensors])


def broadcast_strides(shapes: Sequence[Sizes], strides: Sequence[Sizes], target: Sizes) -> tuple[Sizes, ...]:
    """The strides of tensors expanded to `target`: 0 along broadcast dimensions."""
    result = []
    for sizes, own in zip(shapes, strides, strict=True):
        missing = (0,) * (len(target) - len(sizes))
        result.append(missing + tuple(0 if size == 1 else stride for size, stride in zip(sizes, own, strict=True)))
    return tuple(result)


def merge(order: Sequence[int], sizes: Sizes, inputs: tuple[Sizes, ...]) -> tuple[list[int], list[list[int]]]:
    """Merges consecutive dimensions of `order` if every input allows it. Returns extents and each input's strides."""
    extents: list[int] = []
    strides: list[list[int]] = [[] for _ in inputs]
    for d in order:
        joins = bool(extents) and all(own[-1] == sizes[d] * new[d] for own, new in zip(strides, inputs, strict=True))
        if joins:
            extents[-1] *= sizes[d]
        else:
            extents.append(sizes[d])
        for own, new in zip(strides, inputs, strict=True):
            if joins:
                own[-1] = new[d]
            else:
                own.append(new[d])
    return extents, strides


def by_stride(sizes: Sizes, strides: Sizes) -> list[int]:
    """The dimensions of more than one element, outermost in memory first."""
    return sorted((d for d in range(len(sizes)) if sizes[d] != 1), key=lambda d: -strides[d])


@functools.lru_cache(maxsize=4096)
def elementwise_layout(
    output: Sizes, shapes: tuple[Sizes, ...], strides: tuple[Sizes, ...], target: Sizes
) -> MergedLayout | None:
    """The layout of fewest dimensions in which a result of size `target` and dense strides `output` is contiguous.

    `shapes` and `strides` are those of the inputs, which broadcast to `target`. None if it has more than three
    dimensions.
    """
    inputs = broadcast_strides(shapes, strides, target)
    extents, merged = merge(by_stride(target, output), target, inputs)
    if len(extents) > MAX_DIMENSIONS:
        return None
    padding = MAX_DIMENSIONS - len(extents)
    return MergedLayout((1,) * padding + tuple(extents), tuple((0,) * padding + tuple(own) for own in merged))


def gradient_layout(dense: Tensor, tensors: Sequence[Tensor], *, sums_columns: bool) -> MergedLayout | None:
    """The layout of gradients as `dense` of tensors that broadcast to it; None if a kernel takes none of them as it is.

    sums_columns: `dense` is a contiguous matrix whose rows are summed, so that they are not merged.
    """
    shapes, strides = shapes_and_strides(tensors)
    if not sums_columns:
        return elementwise_layout(dense.stride(), shapes, strides, dense.shape)
    rows = broadcast_strides(shapes, strides, dense.shape)
    return MergedLayout((1, *dense.shape), tuple((0, *own) for own in rows))


@functools.lru_cache(maxsize=4096)
def reduction_layout(shapes: tuple[Sizes, ...], strides: tuple[Sizes, ...], dims: Sizes) -> ReductionLayout | None:
    """The layout of a reduction over `dims` of the first tensor, to which the others broadcast.

    The dimensions form three groups: those outside of the reduced ones in memory, the reduced ones, and those inside.
    None if one of the groups cannot be merged into a single dimension for every tensor.
    """
    sizes, x = shapes[0], strides[0]
    inputs = broadcast_strides(shapes, strides, sizes)
    order = by_stride(sizes, x)
    reduced = [d for d in order if d in dims]
    largest = max((x[d] for d in reduced), default=0)
    outer = [d for d in order if d not in dims and x[d] >= largest]
    inner = [d for d in order if d not in dims and x[d] < largest]
    groups = [merge(group, sizes, inputs) for group in (outer, reduced, inner)]
    if any(len(extents) > 1 for extents, _ in groups):
        return None
    kept = outer + inner
    ascending = sorted(kept)
    return ReductionLayout(
        extents=tuple(extents[0] if extents else 1 for extents, _ in groups),
        strides=tuple(tuple(own[k][0] if own[k] else 0 for _, own in groups) for k in range(len(inputs))),
        result_shape=tuple(kept_sizes(sizes, dims)),
        result_sizes=tuple(sizes[d] for d in kept),
        result_order=None if kept == ascending else tuple(kept.index(d) for d in ascending),
    )


def reduction_runs(sizes: Sizes, strides: Sizes, dims: Sizes) -> tuple[Sizes, ...]:
    """Splits `dims` into groups that merge into one dimension each, outermost in memory first. At least one group."""
    runs: list[list[int]] = []
    for d in (d for d in by_stride(sizes, strides) if d in dims):
        if runs and strides[runs[-1][-1]] == sizes[d] * strides[d]:
            runs[-1].append(d)
        else:
            runs.append([d])
    single = tuple(d for d in dims if sizes[d] == 1)
    if not runs:
        return (single,)
    runs[-1].extend(single)
    return tuple(tuple(run) for run in runs)


def kept_sizes(sizes: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The shape of the result of a reduction over `dims`."""
    return [size for d, size in enumerate(sizes) if d not in dims]
