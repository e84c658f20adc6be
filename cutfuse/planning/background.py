"""The thread that has epilogues compiled into kernels while calls interpret them."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._C import Specialization


class Background:
    """One thread a process, which is started when there is something to compile and ends when there is nothing left.

    The native module keeps a bounded number of specializations, and each is queued once, so the queue is bounded too.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.stop)

    def _reset(self) -> None:
        """Also in the child of a fork, which has no other threads, and no CUDA either."""
        self._changed = threading.Condition()
        self._waiting: deque[Specialization] = deque()
        self._thread: threading.Thread | None = None
        self._compiled = 0
        self._has_warned = False
        self._stops = False

    def add(self, specialization: Specialization) -> None:
        """Queues a specialization that the caller has claimed."""
        with self._changed:
            if self._stops:
                return
            self._waiting.append(specialization)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cutfuse-specialization", daemon=True)
                self._thread.start()

    def compile(self, specialization: Specialization) -> None:
        """Compiles a specialization in this thread, or waits for the one that does so already."""
        was_ready = specialization.is_ready
        is_ready = specialization.compile()
        with self._changed:
            self._compiled += is_ready and not was_ready
        if not is_ready:
            self._warn(specialization)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until nothing is queued. Returns how many kernels are compiled. Raises TimeoutError."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._thread is not None:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"cutfuse.wait: {len(self._waiting) + 1} epilogues are still being compiled after {timeout} s"
                    )
                self._changed.wait(left)
            return self._compiled

    def stop(self) -> None:
        """Lets the thread finish what it compiles, and nothing more: CUDA must not be shut down beneath it."""
        with self._changed:
            self._stops = True
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        try:
            while (specialization := self._next()) is not None:
                self.compile(specialization)
        except BaseException:  # which threading prints; what is queued waits for the next thread
            self._end()
            raise

    def _next(self) -> Specialization | None:
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            self._end()
            return None

    def _end(self) -> None:
        with self._changed:
            self._thread = None
            self._changed.notify_all()

    def _warn(self, specialization: Specialization) -> None:
        """Once a process: what is missing for one kernel is missing for others, and `explain` tells of each."""
        with self._changed:
            if self._has_warned:
                return
            self._has_warned = True
        with contextlib.suppress(RuntimeWarning):  # where warnings are errors, one would end the thread
            warnings.warn(
                f"cutfuse: an epilogue could not be compiled into {specialization.kernel}, and is interpreted, which "
                f"is slower: {specialization.failure}",
                RuntimeWarning,
                stacklevel=2,
            )


background = Background()
