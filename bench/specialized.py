"""How `bench` chooses whether epilogues are interpreted or specialized: no other module of it uses that interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import cutfuse

# Modes of `cutfuse.set_specialization`. With SPECIALIZED a chain's first call waits until its kernel is compiled.
INTERPRETED, SPECIALIZED, BACKGROUND = "off", "now", "background"
LONGEST_WAIT_S = 120.0

T = TypeVar("T")


def in_mode(mode: str, call: Callable[..., T]) -> Callable[..., T]:
    """The call with the process in `mode`: a backward pass runs in another thread than its caller."""

    def run(*arguments: object) -> T:
        before = cutfuse.get_specialization()
        cutfuse.set_specialization(mode)
        try:
            return call(*arguments)
        finally:
            cutfuse.set_specialization(before)

    return run


def wait() -> int:
    """Wait for what is being specialized in the background; the number of kernels that run specialized."""
    return cutfuse.wait(LONGEST_WAIT_S)


def cache_environment(folder: Path) -> dict[str, str]:
    """The environment of a process whose compiled kernels are kept in `folder`, the driver's and cutfuse's own."""
    return {"CUDA_CACHE_PATH": str(folder / "driver"), "XDG_CACHE_HOME": str(folder / "user")}
