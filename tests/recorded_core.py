"""Launches that are written down instead of made: for tests of what is launched, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from cutfuse import native


class RecordedLaunches:
    """`launches`: the arguments of each by name, and its function as `function`, in order."""

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []

    def __call__(self, function: str, arguments: dict[str, Any]) -> None:
        self.write_down(SimpleNamespace(function=function, **arguments))

    def write_down(self, launch: SimpleNamespace) -> None:
        self.launches.append(launch)

    @property
    def names(self) -> list[str]:
        return [launch.function for launch in self.launches]


@contextlib.contextmanager
def recorded(launches: RecordedLaunches) -> Iterator[RecordedLaunches]:
    """Within it, launches are written down."""
    native.module().record_launches(launches)
    try:
        yield launches
    finally:
        native.module().record_launches(None)
