"""Turns on a device that a run's processes share: they prepare cases side by side, and time them one at a time.

Inductor chooses among variants of a Triton kernel by timing them. Where other processes use the device meanwhile, a
slower one may win: a norm of MLP-Mixer-B took 174 us in place of 55, which is 8% of the model's training step.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch._inductor.runtime.triton_heuristics import CachingAutotuner

_benchmark = CachingAutotuner.benchmark_all_configs


class DeviceTurns:
    """Locks of the processes that are given the same folder; a process that ends leaves them free. None: no others."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.depth = 0

    @contextmanager
    def _held(self, name: str, kind: int) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        with (self.folder / name).open("a") as file:  # whose lock ends when it is closed
            fcntl.flock(file, kind)
            yield

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Within it no process times a case. It waits behind those that wait to time one."""
        with ExitStack() as device:
            with self._held("gate", fcntl.LOCK_EX):
                device.enter_context(self._held("device", fcntl.LOCK_SH))
            yield

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Within it no other process uses the device."""
        with self._held("gate", fcntl.LOCK_EX), self._held("device", fcntl.LOCK_EX):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other process is within it. May be entered again inside."""
        self.depth += 1
        try:
            if self.depth > 1:
                yield
                return
            with self._held("alone", fcntl.LOCK_EX):
                yield
        finally:
            self.depth -= 1


def autotune_alone(turns: DeviceTurns) -> None:
    """From now on this process times the variants of Triton kernels in its turns."""

    def benchmark_in_turn(self: CachingAutotuner, *arguments: Any, **keywords: Any) -> Any:
        with turns.alone():
            return _benchmark(self, *arguments, **keywords)

    CachingAutotuner.benchmark_all_configs = benchmark_in_turn  # type: ignore[method-assign]
