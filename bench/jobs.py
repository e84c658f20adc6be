"""Runs a suite's cases in several processes: they are prepared side by side, then timed in turns.

Compiling takes a case longer than timing it, and keeps one core busy. No two processes use the device while one of them
times a case, and while cases are prepared they take turns in what is chosen by its time. The first process tells the
others what to do, and a process that ends loses its own cases alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic

import torch

from bench.case_loop import AnyCase, CaseT, Figures
from bench.device_turns import DeviceTurns, autotune_alone
from bench.progress import Progress
from bench.run_files import key_of, title_of
from bench.runner import one_line
from bench.timing import clock_for

# What processes are given to end by themselves, all together.
JOIN_S = 10.0
# What a process is told, each with the key of a case.
PREPARE, TIME = "prepare", "time"
# What it answers: a case's figures, where there are any, and that it is done and whether the case waits to be timed.
FIGURES, DONE = "figures", "done"

OnCase = Callable[[Figures], None]
# Times a case that is prepared.
Turn = Callable[[], Figures]


class Worker(ABC, Generic[CaseT]):
    """A suite's own part in one of the processes, in which it is made."""

    def __init__(self, turns: DeviceTurns, device: torch.device, compile_threads: int) -> None:
        torch._inductor.config.compile_threads = compile_threads
        self.turns = turns
        self.clock = clock_for(device)

    @abstractmethod
    def cases(self) -> Sequence[CaseT]:
        """All cases of the suite: their functions cannot be sent to the process, which is told their keys."""

    @abstractmethod
    def prepare(self, case: CaseT) -> Turn | Figures:
        """Do all of a case that needs no quiet device: what then times it, or its figures where that is everything."""

    @abstractmethod
    def make_room(self, is_idle: bool) -> None:
        """Free memory, which the processes share; `is_idle`: no case waits. Raises where the device is lost."""


# Sent to a process, so that it is a class or a `partial` of one.
MakeWorker = Callable[[DeviceTurns], Worker[Any]]


def processors() -> int:
    """How many this process may run on, which are fewer than the machine's where several runs share it."""
    return len(os.sched_getaffinity(0))


def failure(case: AnyCase, error: BaseException) -> Figures:
    """The figures of a case that could not be prepared or timed."""
    return {**case.as_dict(), "contenders": {}, "note": f"failed: {one_line(error)}", "seconds": 0.0}


def time_one(case: AnyCase, turn: Turn, seconds: float) -> Figures:
    """The figures of a case whose preparing took `seconds`."""
    began = time.perf_counter()
    try:
        figures = turn()
    except Exception as error:
        figures = failure(case, error)
    return {**figures, "seconds": seconds + time.perf_counter() - began}


def prepare_one(case: CaseT, worker: Worker[CaseT]) -> Turn | Figures:
    """What times the case, or its figures."""
    began = time.perf_counter()
    try:
        found = worker.prepare(case)
    except Exception as error:  # Out of memory while building, say: the others may still fit.
        found = failure(case, error)
    seconds = time.perf_counter() - began
    return {**found, "seconds": seconds} if isinstance(found, dict) else partial(time_one, case, found, seconds)


def work(make: MakeWorker, link: Connection, turns_path: Path) -> None:
    """A process: do what it is told until the other end of the pipe is closed."""
    turns = DeviceTurns(turns_path)
    autotune_alone(turns)
    worker = make(turns)
    cases = {key_of(case.as_dict()): case for case in worker.cases()}
    waiting: dict[tuple[str, ...], Turn] = {}
    with suppress(EOFError, ConnectionError):  # The time is over.
        while True:
            command, key = link.recv()
            found = prepare_one(cases[key], worker) if command == PREPARE else waiting.pop(key)()
            if isinstance(found, dict):
                link.send((FIGURES, found))
            else:
                waiting[key] = found
            del found
            worker.make_room(not waiting)  # Done when the next case is timed, as freeing memory stops the device.
            link.send((DONE, key in waiting))


@dataclass(frozen=True)
class Job:
    """A process and this end of the pipe to it."""

    process: BaseProcess
    link: Connection

    def tell(self, command: str, case: AnyCase) -> None:
        """Give it something to do. One that has ended shows that where its answer is read."""
        with suppress(OSError):
            self.link.send((command, key_of(case.as_dict())))

    def receive(self) -> tuple[str, Any] | None:
        """Its next message; None where it has ended."""
        try:
            message: tuple[str, Any] = self.link.recv()
        except (EOFError, OSError):
            return None
        return message


def start(make: MakeWorker, turns_path: Path) -> Job:
    """Start a process. It is not forked: CUDA does not work in a fork of a process that uses it."""
    context = get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=work, args=(make, other, turns_path))
    process.start()
    other.close()  # Held by the process alone, so that its end is seen here.
    return Job(process, own)


def stop(jobs: Sequence[Job]) -> None:
    """End processes, whether they wait for their turn or not."""
    for job in jobs:
        job.link.close()
    deadline = time.monotonic() + JOIN_S
    for job in jobs:
        job.process.join(max(0.0, deadline - time.monotonic()))
        if job.process.is_alive():
            job.process.kill()
            job.process.join()


@dataclass(frozen=True)
class Record:
    """Where figures go: to `on_case`, and with `line_of` to the progress."""

    progress: Progress
    on_case: OnCase
    line_of: Callable[[Figures], str]
    titles: set[str] = field(default_factory=set)

    def take(self, figures: Figures) -> None:
        """Hand a case's figures on."""
        self.titles.add(title_of(figures))
        self.progress.begin(title_of(figures))
        self.on_case(figures)
        self.progress.finish({**figures, "summary": self.line_of(figures)})

    def left_out(self, cases: Sequence[AnyCase]) -> list[str]:
        """The titles of those cases that have no figures."""
        return [case.title for case in cases if case.title not in self.titles]


class Jobs(Generic[CaseT]):
    """The processes of a run, as the first process sees them. Use as a context manager.

    `deadline` is `time.monotonic`'s: nothing is begun later, and what is prepared then is given up.
    """

    def __init__(self, make: MakeWorker, count: int, deadline: float, record: Record) -> None:
        self.make = make
        self.count = count
        self.deadline = deadline
        self.record = record
        self.members: list[Job] = []
        self.folder = tempfile.TemporaryDirectory(prefix="cutfuse-bench-")
        self.turns_path = Path(self.folder.name) / "turns"
        self.turns_path.touch()
        # Of each case that ended its process: the exit status.
        self.lost: list[tuple[CaseT, int | None]] = []

    def __enter__(self) -> Jobs[CaseT]:
        self.fill()
        return self

    def __exit__(self, *exception: object) -> None:
        stop(self.members)
        self.folder.cleanup()

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline

    def fill(self) -> None:
        """Start processes in place of those that ended."""
        while len(self.members) < self.count and not self.is_over:
            self.members.append(start(self.make, self.turns_path))

    def lose(self, job: Job, case: CaseT) -> None:
        """A process has ended at a case, which has its figures where it was the freeing of memory that failed."""
        stop([job])
        self.members.remove(job)
        if case.title not in self.record.titles:
            self.lost.append((case, job.process.exitcode))

    def attend(self, job: Job, case: CaseT) -> bool | None:
        """Take a process's next message: whether the case waits to be timed; None where it is not done with it."""
        message = job.receive()
        if message is None:
            self.lose(job, case)
            return False
        if message[0] == FIGURES:
            self.record.take(message[1])
            return None
        return bool(message[1])

    def prepare(self, queues: Mapping[Job, deque[CaseT]]) -> dict[Job, list[CaseT]]:
        """Let each process prepare the cases of its queue, which several may share; those that wait to be timed."""
        ready: dict[Job, list[CaseT]] = {job: [] for job in queues}
        busy: dict[Connection, tuple[Job, CaseT]] = {}

        def hand_out(job: Job) -> None:
            if queues[job] and not self.is_over:
                case = queues[job].popleft()
                busy[job.link] = job, case
                job.tell(PREPARE, case)

        for job in queues:
            hand_out(job)
        while busy:
            links = connection.wait(list(busy), max(0.0, self.deadline - time.monotonic()))
            if not links:
                break
            for job, case in [busy[link] for link in links]:
                waits = self.attend(job, case)
                if waits is None:
                    continue
                del busy[job.link]
                if waits:
                    ready[job].append(case)
                    self.record.progress.stage(f"compiled {case.title}")
                if job in self.members:
                    hand_out(job)
        return ready

    def time(self, ready: Mapping[Job, Sequence[CaseT]]) -> None:
        """Let one process after another time its cases, until the deadline."""
        for job, cases in ready.items():
            for case in cases:
                if self.is_over:
                    return
                if job not in self.members:
                    break
                job.tell(TIME, case)
                while self.attend(job, case) is None:
                    pass
