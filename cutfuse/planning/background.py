"""The threads that have epilogues compiled into kernels while calls interpret them."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
from collections import deque
from typing import TYPE_CHECKING

import torch

from .. import native
from .device import on_device

if TYPE_CHECKING:
    from .._C import Specialization


def threads_of(processors: int) -> int:
    """How many threads compile at once on a machine: compiling is work of the CPU, which a model's host code needs."""
    return min(4, max(1, processors // 4))


def threads_while_waited(processors: int) -> int:
    """How many compile at once while a caller does nothing but wait for them."""
    return min(8, max(1, processors // 2))


class Background:
    """Threads of a process, each started for an epilogue that no other has, and ending when nothing is left.

    The native module keeps a bounded number of specializations, and each is queued once, so the queue is bounded too.
    The limit is `most_threads`, and while a caller waits the larger of both; it is read before each start.
    """

    def __init__(self, most_threads: int, most_while_waited: int) -> None:
        self.most_threads = most_threads
        self.most_while_waited = most_while_waited
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.stop)

    def _reset(self) -> None:
        """Also in the child of a fork, which has no other threads, and no CUDA either."""
        self._changed = threading.Condition()
        self._waiting: deque[Specialization] = deque()
        self._threads: set[threading.Thread] = set()  # each has one epilogue that is not in `_waiting`
        self._compiling = 0  # how many epilogues callers compile in their own threads
        self._waits = 0  # callers in `wait`
        self._has_warned = False
        self._stops = False

    def add(self, specialization: Specialization) -> None:
        """Queues a specialization that the caller has claimed."""
        with self._changed:
            if not self._stops:
                self._waiting.append(specialization)
        self.start_threads()

    def start_threads(self) -> None:
        """Starts threads for what is queued, also where none could be started before."""
        with self._changed:
            self._start_threads()

    def compile(self, specialization: Specialization) -> None:
        """Compiles a specialization in this thread, or waits for the one that does so already."""
        with self._changed:
            self._compiling += 1
        try:
            self._compile(specialization)
        finally:
            with self._changed:
                self._compiling -= 1
                self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> int:
        """Waits until nothing is queued or being compiled. Returns how many kernels are compiled. Raises TimeoutError.

        Compiles in this thread where none can be started, and then takes as long as that does.
        """
        with self._changed:
            is_waiting = timeout is None or timeout > 0  # a caller that only looks goes on with other work
            self._waits += is_waiting
            try:
                self._start_threads()
                if is_waiting and not self._threads:
                    self._compile_waiting()
                is_done = self._changed.wait_for(lambda: self._left() == 0, timeout)
            finally:
                self._waits -= is_waiting
            if not is_done:
                count = self._left()
                what = "1 epilogue is" if count == 1 else f"{count} epilogues are"
                raise TimeoutError(f"cutfuse.wait: {what} still being compiled after {timeout} s")
        return native.core.compiled_count()

    def wait_for(self, specialization: Specialization) -> None:
        """Waits for a specialization that a thread compiles or will; not for one that nobody has asked for."""
        if not specialization.is_claimed:
            return
        with self._changed:
            self._changed.wait_for(lambda: not specialization.is_pending or not (self._threads or self._compiling))

    def stop(self) -> None:
        """Lets each thread finish what it compiles, and nothing more: CUDA must not be shut down beneath them."""
        with self._changed:
            self._stops = True
            self._waiting.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _left(self) -> int:
        return len(self._waiting) + len(self._threads) + self._compiling

    def _compile(self, specialization: Specialization) -> None:
        with _on_device(specialization.device):
            is_ready = specialization.compile()
        with self._changed:
            self._changed.notify_all()
        if not is_ready:
            self._warn(specialization)

    def _compile_waiting(self) -> None:
        """Compiles what is queued in this thread, which holds the lock and lets go of it meanwhile."""
        while self._waiting:
            specialization = self._waiting.popleft()
            self._changed.release()
            try:
                self.compile(specialization)
            finally:
                self._changed.acquire()
        self._note_stall()

    def _start_threads(self) -> None:
        """Starts a thread for each that waits, up to the limit. Where none can be started, what is queued waits for a
        running thread or the next attempt, and is interpreted meanwhile: a limit of threads, or a process that is about
        to end."""
        with contextlib.suppress(RuntimeError):
            while self._waiting and len(self._threads) < self._most():
                first = self._waiting[0]
                thread = threading.Thread(target=self._run, args=(first,), name="cutfuse-specialization", daemon=True)
                thread.start()
                self._waiting.popleft()
                self._threads.add(thread)
        self._note_stall()

    def _note_stall(self) -> None:
        """Has calls try again that wait for what no thread will compile."""
        native.core.set_stalled(bool(self._waiting) and not self._threads)

    def _most(self) -> int:
        return max(self.most_threads, self.most_while_waited) if self._waits > 0 else self.most_threads

    def _run(self, first: Specialization) -> None:
        specialization: Specialization | None = first
        try:
            while specialization is not None:
                self._compile(specialization)
                specialization = self._next()
        except BaseException:  # which threading prints; another thread goes on
            self._end()
            raise

    def _next(self) -> Specialization | None:
        with self._changed:
            if self._waiting and len(self._threads) <= self._most():
                return self._waiting.popleft()
            self._end()
            return None

    def _end(self) -> None:
        with self._changed:
            self._threads.discard(threading.current_thread())
            self._start_threads()
            self._changed.notify_all()

    def _warn(self, specialization: Specialization) -> None:
        """Once a process: what is missing for one kernel is missing for others, and `explain` tells of each."""
        with self._changed:
            if self._has_warned:
                return
            self._has_warned = True
        with contextlib.suppress(RuntimeWarning):  # where warnings are errors, one would end the thread
            warnings.warn(
                f"cutfuse: {specialization.kernel} runs an epilogue as in its first calls, which is slower, because "
                f"compiling it failed: {specialization.failure}",
                RuntimeWarning,
                stacklevel=2,
            )


def _on_device(index: int) -> contextlib.AbstractContextManager[object]:
    """PyTorch's context for a device: leaving it opens no CUDA context on a device that has none."""
    return on_device(index) if torch.cuda.is_available() else contextlib.nullcontext()


_processors = os.cpu_count() or 1
background = Background(threads_of(_processors), threads_while_waited(_processors))
