"""What a launch needs to know of a CUDA device and of the binding: nothing is touched before a tensor arrives."""

from __future__ import annotations

import contextlib
import functools

import torch

from .. import native

_NOTHING = contextlib.nullcontext()


def stream_of(index: int) -> int:
    """The current stream's handle. Read inside an operator's implementation, never while tracing."""
    return torch.cuda.current_stream(index).cuda_stream


def on_device(index: int) -> contextlib.AbstractContextManager[object]:
    """Makes device `index` current. Where it already is, this costs one comparison."""
    return _NOTHING if index == torch.cuda.current_device() else torch.cuda.device(index)


@functools.lru_cache(maxsize=64)
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.lru_cache(maxsize=1)
def dtype_codes() -> dict[torch.dtype, int]:
    return {getattr(torch, name): code for name, code in native.core.dtypes().items()}


@functools.lru_cache(maxsize=1)
def reduction_codes() -> dict[str, int]:
    return {"none": 0, **native.core.reductions()}
