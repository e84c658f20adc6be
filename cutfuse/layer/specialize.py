"""Which kernels of a plan run its epilogue compiled in, and the threads that compile it while calls interpret it."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from .. import native
from ..epilogue import Program
from ..native import predicted_facts
from .layouts import on_device

if TYPE_CHECKING:
    from .._C import LinearPlan, PointwiseBackwardProblem, PointwiseProblem, ReduceProblem, Specialization
    from .._C import Program as NativeProgram


Epilogues = list["Specialization"]
Matrix: TypeAlias = tuple[int, int, int, int, int]  # address, type and strides, as the native module takes them
Problem: TypeAlias = "PointwiseProblem | PointwiseBackwardProblem | ReduceProblem"

_warned_of: set[str] = set()

OFF = 'cutfuse.specialization is "off"'
COMPILED_IN = "nothing: the kernels are built already, and have the program compiled in"
NO_PROLOGUE = "nothing: no program precedes the reduction"


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


def cost_when_specialized(program: Program, dtype: torch.dtype, out_dtype: torch.dtype) -> float | None:
    """What a program takes that GEMM kernels have compiled in, or will have; None where they interpret it for good.

    A single activation is planned alike in every mode, though the function that kernels call for it takes up to 15%
    longer than what is compiled.
    """
    if not program.native.is_interpreted or not why_interpreted():
        return program.native.specialized_cost(is_accurate=torch.float32 in (dtype, out_dtype))
    reason = native.core.why_not_specialized()
    if reason and not _is_off() and native.has_kernels() and torch.cuda.is_available():
        _warn_without_compiler(reason)
    return None


def why_interpreted() -> str:
    """Why no program is compiled into its kernel in this thread's mode; empty where programs are."""
    if _is_off():
        return OFF
    return "" if predicted_facts() else native.core.why_not_specialized()  # a card has a driver that compiles


def _is_off() -> bool:
    return native.core.specialization_mode() == native.core.SpecializationMode.off


def explain_epilogues(plan: LinearPlan, device: int, program: Program, operands: Sequence[Matrix]) -> str:
    """What a call with this fused plan has compiled, or why nothing."""
    is_empty = not program.instructions
    if not program.native.is_interpreted and why_interpreted():
        return COMPILED_IN
    if not (is_empty or plan.specializes):
        return f"nothing: the kernel interprets the program, because {why_interpreted()}"
    epilogues = find_epilogues(plan, device, program, operands)
    if not epilogues and is_empty:
        return COMPILED_IN
    if not epilogues:
        return (
            f"nothing: the kernel {_meanwhile(program.native)}, because this process has asked for "
            f"{native.core.most_specializations} others already"
        )
    return "; ".join(_explain(epilogue, program.native) for epilogue in epilogues)


def explain_pass(program: Program, reduces: bool, find: Callable[[], Epilogues]) -> str:
    """What a kernel that does not multiply has compiled of a program, in this thread's mode.

    reduces: the kernel reduces what the program gives; such kernels have no chains built in. find: gives the program
    in that kernel; it is not called where nothing can be compiled.
    """
    if reduces and not program.instructions:
        return NO_PROLOGUE
    if not (program.native.without_chain if reduces else program.native).is_interpreted:
        return COMPILED_IN
    reason = why_interpreted()
    if reason:
        return f"nothing: the kernels interpret the program, because {reason}"
    found = find()
    if not found:
        return (
            "nothing: the kernel interprets the program, because the tensors are no whole aligned vectors, or this "
            f"process has asked for {native.core.most_specializations} others already"
        )
    return _explain(found[0], program.native.without_chain if reduces else program.native)


def _explain(epilogue: Specialization, program: NativeProgram) -> str:
    core = native.core
    meanwhile = "it is interpreted" if program.is_interpreted else "the kernel calls a function for it"
    if program.has_eager_formulas:
        meanwhile = "PyTorch computes the layer"
    until_then = f"until then {meanwhile}"
    if epilogue.is_ready:
        return f"done: {epilogue.kernel} has the program compiled in, which took {epilogue.seconds:.2f} s"
    if epilogue.failure:
        return f"nothing: {epilogue.kernel} {_meanwhile(program)}, because compiling it failed: {epilogue.failure}"
    if epilogue.is_claimed:
        return f"the program into {epilogue.kernel}, at this moment; {until_then}"
    if core.specialization_mode() == core.SpecializationMode.now:
        return f"the program into {epilogue.kernel}, before the first call runs"
    return f"the program into {epilogue.kernel}, in the background; {until_then}"


def _meanwhile(program: NativeProgram) -> str:
    """What a kernel does with a program that is not compiled into its text."""
    if program.has_eager_formulas:
        return "does not run, and PyTorch computes the layer"
    return "interprets the program" if program.is_interpreted else "calls a function of its own for the program"


def find_epilogues(plan: LinearPlan, device: int, program: Program, operands: Sequence[Matrix]) -> Epilogues:
    """The program in the kernel of each product of a plan, or of the pass behind cuBLAS's; empty where kernels
    interpret it for good.

    operands: with address 0 where that is not known yet. An epilogue that nobody has asked for before is neither
    compiled nor queued here: see `request`.
    """
    if why_interpreted():  # a plan does not say so of a chain that kernels call
        return []
    return native.core.find_epilogues(plan, device, program.native, list(operands))


def find_alone(problem: Problem, device: int) -> Epilogues:
    """The program of a problem without a product in the kernel that runs it; empty where it is interpreted for good."""
    found = None if why_interpreted() else problem.find_specialization(device)
    return [] if found is None else [found]


def request(epilogues: Epilogues) -> None:
    """Has epilogues compiled: in the background, or before this returns in the mode "now".

    While the current stream is captured nothing is started, and what has been started is waited for: the graph keeps
    the kernels that it captures.
    """
    pending = [epilogue for epilogue in epilogues if epilogue.is_pending]
    if not pending:
        return
    core = native.core
    if is_capturing():
        for epilogue in pending:
            background.wait_for(epilogue)
        return
    is_now = core.specialization_mode() == core.SpecializationMode.now
    for epilogue in pending:
        is_first = epilogue.claim()
        if is_now:
            background.compile(epilogue)
        elif is_first:
            background.add(epilogue)
        else:
            background.start_threads()


def are_requested(epilogues: Epilogues) -> bool:
    """Whether each is compiled, or will be."""
    return all(epilogue.is_claimed for epilogue in epilogues)


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _warn_without_compiler(reason: str) -> None:
    """Once a process, also where warnings are errors."""
    if reason in _warned_of:
        return
    _warned_of.add(reason)
    warnings.warn(
        f"cutfuse: epilogues are interpreted, which is slower than running them compiled: {reason}. Update the driver, "
        'or call cutfuse.set_specialization("off") to say that this is known.',
        RuntimeWarning,
        stacklevel=4,
    )
