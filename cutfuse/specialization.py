"""Epilogues compiled into the kernels: which mode is asked for, and waiting for them.

A kernel can run any epilogue at once because it interprets it. Compiled into the kernel, the same epilogue gives the
same bits in less time. On an H200 it runs 0.7 to 1.1 s after the first call, and 9 to 14 ms where the CUDA driver's
cache on disk has the kernel. A mode is "background" (first calls interpret, while a thread has the kernel compiled),
"now" (a first call waits for it) or "off" (every call interprets). A thread's innermost `with specialization(mode)`
decides, then the process's `set_specialization`; "background" where neither was called.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import dynamo, native
from .arguments import refuse_type
from .layer.specialize import background

if TYPE_CHECKING:
    from ._C import SpecializationMode

MODES = ("background", "now", "off")
_INSIDE = (
    "a compiled function reads cutfuse.specialization when it runs: enter it around the call of the compiled function"
)


@dynamo.disable_because(_INSIDE)
def specialization(mode: str) -> contextlib.AbstractContextManager[None]:
    """A context in which this thread's calls run their epilogues in `mode`.

    Contexts nest, and the result decorates functions too. A compiled function reads the mode when it runs: enter the
    context around it, not inside of it. A result's bits, but for a NaN's sign and payload, depend on "off" or not, and
    on nothing else: where epilogues may be compiled, a product's kernel is chosen for that from the first call on.

    Raises:
        ValueError: `mode` is not "background", "now" or "off".
    """
    return _entered(_checked(mode))


@dynamo.disable_because("call cutfuse.set_specialization outside of compiled functions, which read it when they run")
def set_specialization(mode: str) -> None:
    """Makes `mode` that of every thread outside of `specialization`'s contexts.

    Raises:
        ValueError: `mode` is not "background", "now" or "off".
    """
    native.core.set_process_specialization_mode(_checked(mode))


@dynamo.disable_because("call cutfuse.get_specialization outside of compiled functions, which read it when they run")
def get_specialization() -> str:
    """The mode that `set_specialization` was given last, whatever context this is; "background" before that."""
    return native.core.process_specialization_mode().name


@dynamo.disable_because("call cutfuse.wait outside of compiled functions: it waits for threads of this process")
def wait(timeout: float | None = None) -> int:
    """Waits until every epilogue that calls have asked for so far is compiled: before a measurement or a capture.

    timeout: in seconds; None waits as long as it takes. Where the process can start no thread, this one compiles, which
    the timeout does not end. Returns how many compiled kernels this process has.

    Raises:
        TimeoutError: some are still being compiled.
        TypeError: `timeout` is no number.
        ValueError: it is negative, or more than a lock can wait.
    """
    _check_timeout(timeout)
    return background.wait(timeout)


def _check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        refuse_type("wait", "timeout", "a number of seconds or None", timeout)
    if not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"cutfuse.wait: timeout has to be from 0 to {threading.TIMEOUT_MAX:.0f} seconds, or None for as long as it "
            f"takes, got {timeout}"
        )


def _checked(mode: str) -> SpecializationMode:
    if mode not in MODES:
        choices = ", ".join(f'"{choice}"' for choice in MODES)
        raise ValueError(f"cutfuse: a specialization is one of {choices}, got {mode!r}")
    return native.core.SpecializationMode.__members__[mode]


@contextlib.contextmanager
def _entered(mode: SpecializationMode) -> Iterator[None]:
    before = _exchange(mode)
    try:
        yield
    finally:
        _exchange(before)


@dynamo.disable_because(_INSIDE)
def _exchange(mode: SpecializationMode | None) -> SpecializationMode | None:
    """Sets this thread's mode, and gives the one before."""
    before = native.core.thread_specialization_mode()
    native.core.set_thread_specialization_mode(mode)
    return before
