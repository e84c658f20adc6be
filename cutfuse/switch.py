"""Modes that hold or do not: a thread's innermost context decides, then the process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar


class Switch:
    """One such mode. Direct calls read `context` and, by its name, `of_process`; Dynamo guards `holds_somewhere`."""

    def __init__(self, name: str) -> None:
        self.context: ContextVar[bool | None] = ContextVar(name, default=None)
        self.of_process = False
        self.holds_somewhere = False  # in a thread's context, or in the process
        self._contexts = 0  # that are entered, of all threads
        self._counting = threading.Lock()

    def holds(self) -> bool:
        found = self.context.get()
        return self.of_process if found is None else found

    def set_process(self, on: bool) -> None:
        self.of_process = on
        self._count(0)

    @contextlib.contextmanager
    def entered(self, on: bool) -> Iterator[None]:
        self._count(int(on))
        try:
            with self.of_call(on):
                yield
        finally:
            self._count(-int(on))

    @contextlib.contextmanager
    def of_call(self, on: bool) -> Iterator[None]:
        """For one call, which other threads' compiled code does not follow."""
        token = self.context.set(on)
        try:
            yield
        finally:
            self.context.reset(token)

    def _count(self, more: int) -> None:
        """Counts contexts that are entered and left."""
        with self._counting:
            self._contexts += more
            self.holds_somewhere = self._contexts > 0 or self.of_process
