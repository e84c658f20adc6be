"""Which way calls take where it is not theirs to say: the operators' everywhere, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import native

everywhere = False


@contextlib.contextmanager
def use_operators_everywhere() -> Iterator[None]:
    """Within it, every device and type takes the operators and the autograd built on them."""
    global everywhere
    before, everywhere = everywhere, True
    native.core.pause_calls(True)  # direct calls do not look at what is set here
    try:
        yield
    finally:
        native.core.pause_calls(False)
        everywhere = before
