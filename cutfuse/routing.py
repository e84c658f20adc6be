"""Which way calls take where it is not theirs to say: the operators' everywhere, for tests, or none, for `explain`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import native

everywhere = False
# By thread: is given each call of a public function in normal form, before it runs.
observers: dict[int, Callable[[Any], None]] = {}


@contextlib.contextmanager
def use_operators_everywhere() -> Iterator[None]:
    """Within it, every device and type takes the operators and the autograd built on them."""
    global everywhere
    before, everywhere = everywhere, True
    try:
        with _no_direct_calls():
            yield
    finally:
        everywhere = before


@contextlib.contextmanager
def _no_direct_calls() -> Iterator[None]:
    """Within it, every call takes the general path, which looks at what is set here."""
    native.core.pause_calls(True)
    try:
        yield
    finally:
        native.core.pause_calls(False)


def observe(call: Any) -> None:
    """Shows a call to this thread's observer, if it has one. Called only where there are observers at all."""
    observer = observers.get(threading.get_ident())
    if observer is not None:
        observer(call)


@contextlib.contextmanager
def observed_by(observer: Callable[[Any], None]) -> Iterator[None]:
    """Within it, `observer` is given every call of this thread; raising there keeps the call from running."""
    thread = threading.get_ident()
    observers[thread] = observer
    try:
        with _no_direct_calls():
            yield
    finally:
        del observers[thread]
