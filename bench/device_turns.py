"""Turns on a device that a run's processes share while they prepare their cases.

Inductor chooses among variants of a Triton kernel by timing them. Where other processes use the device meanwhile, a
slower one may win: a norm of MLP-Mixer-B took 174 us in place of 55, which is 8% of the model's training step.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._inductor.runtime.triton_heuristics import CachingAutotuner

_benchmark = CachingAutotuner.benchmark_all_configs


class DeviceTurns:
    """A lock of the processes that are given the same file; a process that ends leaves it free."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.depth = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other process is within it. May be entered again inside."""
        self.depth += 1
        try:
            if self.depth > 1:
                yield
                return
            with self.path.open("rb") as file:  # whose lock ends when it is closed
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        finally:
            self.depth -= 1


def autotune_alone(turns: DeviceTurns) -> None:
    """From now on this process times the variants of Triton kernels in its turns."""

    def benchmark_in_turn(self: CachingAutotuner, *arguments: Any, **keywords: Any) -> Any:
        with turns.alone():
            return _benchmark(self, *arguments, **keywords)

    CachingAutotuner.benchmark_all_configs = benchmark_in_turn  # type: ignore[method-assign]
