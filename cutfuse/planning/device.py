"""What a kernel launch needs to know of a CUDA device and of the native module. Reads nothing before the first call."""

from __future__ import annotations

import contextlib
import functools

import torch

from .. import native
from ..native import DeviceFacts, predicted_facts

NOT_CUDA: DeviceFacts = (0, 0, 0)

_NOTHING = contextlib.nullcontext()


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


@functools.lru_cache(maxsize=1)
def dtype_codes() -> dict[torch.dtype, int]:
    return {getattr(torch, name): code for name, code in native.core.dtypes().items()}


@functools.lru_cache(maxsize=1)
def reduction_codes() -> dict[str, int]:
    return {"none": 0, **native.core.reductions()}
