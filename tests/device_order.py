"""Which device a test process takes first, on a machine with several: those of pytest-xdist begin at different ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def visible_devices(folder: Path = Path("/dev")) -> list[str]:
    """The devices that this process may use, as CUDA_VISIBLE_DEVICES names them. folder: where their files are."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(index) for index in range(len(list(folder.glob("nvidia[0-9]*"))))]


def order_of(devices: Sequence[str], worker: str) -> list[str]:
    """All devices, in an order that begins at another one for each worker, which are called gw0, gw1, and so on."""
    first = int(worker.removeprefix("gw")) % len(devices) if worker and devices else 0
    return [*devices[first:], *devices[:first]]


def take_devices_in_turn() -> None:
    """Let this process begin at a device of its own, where it is a worker of pytest-xdist; it still sees all others.

    To be called before CUDA is used, which reads the variable once.
    """
    devices = visible_devices()
    if len(devices) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(order_of(devices, os.environ.get("PYTEST_XDIST_WORKER", "")))
