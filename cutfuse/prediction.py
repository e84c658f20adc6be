"""The GPUs that `explain` and `explain_model` predict for without one, and which of them this thread predicts for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from . import dynamo

DeviceFacts = tuple[int, int, int]


class Card(NamedTuple):
    """What the planner asks of a device: compute capability and multiprocessors. caution: of its predicted times."""

    facts: DeviceFacts
    caution: str = ""


CARDS = {
    "H200": Card((9, 0, 132)),
    # The SXM module: 3.35 TB/s, where an H200 has 4.8.
    "H100": Card((9, 0, 132), ", with the times of an H200, whose memory is 1.4 times as fast"),
}

_predicted: ContextVar[DeviceFacts | None] = ContextVar("cutfuse_predicted", default=None)


@contextlib.contextmanager
def predicting(function: str, device: str | None) -> Iterator[None]:
    """Within it, calls of this thread on tensors outside of CUDA devices are planned as on this card; as ever for None.

    Raises ValueError for a name that is none of `CARDS`. function: which one is called, for that error.
    """
    if device is None:
        yield
        return
    if device not in CARDS:
        raise ValueError(
            f"cutfuse.{function}: device has to be one of {', '.join(map(repr, CARDS))}, or None for the tensors' own, "
            f"got {device!r}"
        )
    token = _predicted.set(CARDS[device].facts)
    try:
        with _autocast_of_card():
            yield
    finally:
        _predicted.reset(token)


def _autocast_of_card() -> contextlib.AbstractContextManager[object]:
    """Autocast of CUDA devices, where that is on, for the tensors on the CPU that stand for the card's."""
    if not torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda"))


def predicted_facts() -> DeviceFacts | None:
    """Of the card that stands in for devices that are no CUDA devices; None where none does."""
    return _predicted.get()


@dynamo.assume_constant_result
def stands_in_for(device: torch.device) -> bool:
    """Whether a card is predicted for in the place of this device: CUDA devices answer for themselves."""
    return device.type != "cuda" and _predicted.get() is not None


def address_of(tensor: Tensor) -> int:
    """A tensor's address; on a card that is predicted for the offset in its storage, which PyTorch aligns there."""
    return int(tensor.storage_offset()) * tensor.element_size() if stands_in_for(tensor.device) else tensor.data_ptr()


def check_devices(function: str, device: str | None, devices: Iterable[torch.device]) -> None:
    """Raises ValueError where tensors are on another CUDA device than the one that is asked about."""
    if device is None:
        return
    for own in devices:
        if own.type != "cuda":
            continue
        properties = torch.cuda.get_device_properties(own)
        facts = properties.major, properties.minor, properties.multi_processor_count
        if facts != CARDS[device].facts:
            raise ValueError(
                f"cutfuse.{function}: device={device!r} predicts for tensors outside of CUDA devices, but there is one "
                f'on {own}, a {properties.name}; move the call to the CPU or to device="meta", or leave device out'
            )


def described(device: str) -> str:
    """What is to be read beside everything that is predicted for a card."""
    return f"a prediction for an {device}{CARDS[device].caution}; nothing ran on one"
