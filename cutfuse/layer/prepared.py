"""Prepared weights: a snapshot of the weight, which tells of changes, and its planes (csrc/split/planes.h).

Both are plain tensors, so that compiled code can pass them on to operators as it passes the weight.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, NoReturn

import torch
import torch._dynamo
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import native
from .layouts import on_device, stream_of


class Planes(NamedTuple):
    """The planes of a weight: values, scales and flags in one piece of memory, with the planner's layout."""

    scheme: int  # a number of native.core.SplitScheme
    memory: Tensor


def split_weight(weight: Tensor, scheme: int) -> Planes:
    """Splits `weight` [rows, columns], an fp32 matrix of any strides, into newly allocated planes."""
    rows, columns = weight.shape
    is_transposed = columns > 1 and weight.stride(1) != 1
    layout = native.core.weight_planes(rows, columns, scheme, is_transposed)
    memory = torch.empty(layout.bytes, dtype=torch.uint8, device=weight.device)
    begin, pieces, index = memory.data_ptr(), layout.pieces, weight.device.index
    with on_device(index):
        native.core.split(
            stream_of(index),
            scheme,
            True,
            weight.data_ptr(),
            rows,
            columns,
            weight.stride(0),
            weight.stride(1) if columns > 1 else 1,
            begin + pieces.values.offset,
            begin + pieces.scales.offset,
            begin + pieces.flags.offset,
        )
    return Planes(scheme, memory)


_DEFAULT_STREAM = 0


class Prepared(NamedTuple):
    """The last three arguments of the linear operators."""

    snapshot: Tensor | None = None
    planes: Tensor | None = None  # the memory of the planes
    scheme: int = 0  # the scheme of the planes; 0 if there are none


UNPREPARED = Prepared()


def take_snapshot(weight: Tensor) -> Tensor:
    """An alias of the weight that keeps its present version number. It also keeps the memory from being reused."""
    alias = weight.data
    if not weight.is_inference():
        increment_version(itertools.repeat(alias, weight._version))
    _share_with_graphs(alias)
    return alias


def make_planes(weight: Tensor, scheme: int) -> Tensor:
    """Splits `weight`, fp32 on a CUDA device, and returns the memory of its planes. Every stream may read them at once.

    Raises RuntimeError while the current stream is captured.
    """
    with torch.cuda.device(weight.device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "cutfuse.prepare: a CUDA graph is being captured on the current stream; prepare the weight before"
            )
        # Allocated on the default stream, so that `planes_of` need not be told which stream has allocated it.
        stream = torch.cuda.default_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            planes = split_weight(weight, scheme)
        stream.synchronize()
    _share_with_graphs(planes.memory)
    return planes.memory


def _share_with_graphs(tensor: Tensor) -> None:
    """Has torch.compile's CUDA graphs read the tensor in place, as parameters, and not copy it for each replay."""
    torch._dynamo.mark_static_address(tensor, guard=False)


def planes_of(
    weight: Tensor, snapshot: Tensor | None = None, planes: Tensor | None = None, scheme: int = 0
) -> Planes | None:
    """The planes of a prepared weight, or None if it has none. Raises RuntimeError if the weight has changed since."""
    if snapshot is None:
        return None
    # torch.compile's CUDA graphs may copy their inputs before a capture.
    if not torch.cuda.is_current_stream_capturing():
        check_unchanged(weight, snapshot)
    if planes is None:
        return None
    index = weight.device.index
    if stream_of(index) != _DEFAULT_STREAM:
        planes.record_stream(torch.cuda.current_stream(index))
    return Planes(scheme, planes)


def check_unchanged(weight: Tensor, snapshot: Tensor) -> None:
    """Raises RuntimeError if the weight has changed since its snapshot."""
    change = _find_change(weight, snapshot)
    if change:
        refuse_changed(snapshot.shape, change)


def refuse_changed(shape: torch.Size, change: str) -> NoReturn:
    raise RuntimeError(
        f"cutfuse: a weight of shape {tuple(shape)} has changed since it was prepared: {change}; call prepare again"
    )


def _find_change(weight: Tensor, snapshot: Tensor) -> str:
    """What has changed in the weight since its snapshot; empty if nothing has."""
    if weight.device != snapshot.device:
        return f"it was on {snapshot.device} and is on {weight.device}"
    if weight.dtype != snapshot.dtype:
        return f"it was {snapshot.dtype} and is {weight.dtype}"
    if weight.shape != snapshot.shape or weight.stride() != snapshot.stride():
        return f"its strides were {snapshot.stride()}, and are {weight.stride()} with shape {tuple(weight.shape)}"
    if weight.data_ptr() != snapshot.data_ptr():
        return "it lies in other memory, by an assignment to .data, by set_() or by being moved"
    versions = _version(snapshot), _version(weight)
    if versions[0] != versions[1]:
        return f"it was written in place (version {versions[0]} then, {versions[1]} now)"
    return ""


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
