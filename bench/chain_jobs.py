"""Runs the chains suite in several processes: their cases are compiled and checked side by side, then timed in turns.

Compiling takes a case longer than timing it, and keeps one core busy. No two processes use the device while one of them
times a case. max-autotune chooses its kernels by timing them, so it is compiled in that turn too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from bench.case_loop import Figures
from bench.chain_cases import Case, all_cases
from bench.chain_contenders import AUTOTUNE
from bench.chain_run import Options, Prepared, prepare, timed
from bench.progress import Progress
from bench.run_files import key_of, title_of
from bench.runner import one_line
from bench.timing import Clock, clock_for

# Each process has its graphs of the functions that all workloads share; PyTorch's limit is eight.
GRAPHS = 1024
JOIN_S = 30.0
# What a process sends: the title of a case that it has prepared, a case's figures, and that all are prepared.
PREPARED, FIGURES, READY = "prepared", "figures", "ready"

OnCase = Callable[[Figures], None]


@dataclass(frozen=True)
class Share:
    """One process's cases, by their keys: their functions cannot be sent to it, so that it draws them again."""

    small: bool
    quick: bool
    seed: int
    keys: tuple[tuple[str, ...], ...]
    compile_threads: int

    def cases(self) -> list[Case]:
        """The cases, in the order of the keys."""
        drawn = {key_of(case.as_dict()): case for case in all_cases(self.small, self.quick, self.seed)}
        return [drawn[key] for key in self.keys]


@dataclass(frozen=True)
class Job:
    """A process and this end of the pipe to it."""

    process: BaseProcess
    link: Connection

    def receive(self) -> tuple[str, Any] | None:
        """Its next message; None where it has ended."""
        try:
            message: tuple[str, Any] = self.link.recv()
        except (EOFError, OSError):
            return None
        return message


def failure(case: Case, error: BaseException) -> Figures:
    """The figures of a case that could not be built or timed."""
    return {**case.as_dict(), "contenders": {}, "note": f"failed: {one_line(error)}", "seconds": 0.0}


def prepare_all(
    cases: Sequence[Case], options: Options, clock: Clock, link: Connection
) -> list[tuple[Prepared, float]]:
    """Compile and check everything but max-autotune; the cases, and the seconds that each one took."""
    names = tuple(name for name in options.contenders if name != AUTOTUNE)
    found = []
    for case in cases:
        began = time.perf_counter()
        try:
            prepared = prepare(case, names, options, clock, Progress(0))
        except Exception as error:  # Out of memory while building, say: the others may still fit.
            link.send((FIGURES, failure(case, error)))
        else:
            found.append((prepared, time.perf_counter() - began))
            link.send((PREPARED, case.title))
        if options.device.type == "cuda":
            torch.cuda.empty_cache()  # The processes share the device's memory.
    return found


def time_one(prepared: Prepared, options: Options, clock: Clock) -> Figures:
    """The case's figures: max-autotune is compiled where the case has it, and all contenders are timed."""
    try:
        if AUTOTUNE in options.contenders:
            prepared.add((AUTOTUNE,), options, clock, Progress(0))
        figures = {**prepared.case.as_dict(), **timed(prepared, options, clock, Progress(0))}
    except Exception as error:
        figures = failure(prepared.case, error)
    clock.wait()  # Raises where a kernel's fault has cost the process its device: no later case is to be timed.
    return figures


def work(share: Share, options: Options, link: Connection) -> None:
    """A process: prepare its cases, then time one whenever it is told to."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = GRAPHS
    torch._inductor.config.compile_threads = share.compile_threads
    clock = clock_for(options.device)
    prepared = prepare_all(share.cases(), options, clock, link)
    link.send((READY, len(prepared)))
    for one, seconds in prepared:
        try:
            link.recv()
        except EOFError:  # The time is over.
            return
        began = time.perf_counter()
        figures = time_one(one, options, clock)
        link.send((FIGURES, {**figures, "seconds": seconds + time.perf_counter() - began}))


def shares_of(cases: Sequence[Case], results: dict[str, Any], jobs: int) -> list[Share]:
    """The cases dealt out in turns, those with max-autotune first, so that every process has as many of them."""
    small, quick, seed = (results["settings"][name] for name in ("small", "quick", "seed"))
    order = sorted(cases, key=lambda case: not case.is_autotuned)
    threads = max(1, (os.cpu_count() or 1) // 4)
    dealt = (order[place::jobs] for place in range(min(jobs, len(order))))
    return [Share(small, quick, seed, tuple(key_of(case.as_dict()) for case in own), threads) for own in dealt]


def start(share: Share, options: Options) -> Job:
    """Start a process. It is not forked: CUDA does not work in a fork of a process that uses it."""
    context = get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=work, args=(share, options, other))
    process.start()
    other.close()  # Held by the process alone, so that its end is seen here.
    return Job(process, own)


def wait_until_ready(jobs: Sequence[Job], progress: Progress, on_figures: OnCase) -> dict[Job, int]:
    """Wait until every process has prepared its cases or has ended; how many cases each of the former has."""
    ready: dict[Job, int] = {}
    waiting = {job.link: job for job in jobs}
    while waiting:
        for link in connection.wait(list(waiting)):
            job = next(job for job in waiting.values() if job.link is link)
            message = job.receive()
            if message is None:
                del waiting[job.link]
            elif message[0] == READY:
                ready[job] = message[1]
                del waiting[job.link]
            elif message[0] == FIGURES:
                on_figures(message[1])
            else:
                progress.stage(f"compiled {message[1]}")
    return ready


def time_in_turns(ready: dict[Job, int], deadline: float, on_figures: OnCase) -> None:
    """Let one process after another time its cases, until the deadline."""
    for job, count in ready.items():
        for _ in range(count):
            if time.monotonic() > deadline:
                return
            job.link.send(True)
            message = job.receive()
            if message is None:
                break
            on_figures(message[1])


def stop(job: Job) -> None:
    """End a process, whether it waits for its turn or not."""
    job.link.close()
    job.process.join(JOIN_S)
    if job.process.is_alive():
        job.process.kill()
        job.process.join()


def run_jobs(
    cases: Sequence[Case],
    jobs: int,
    results: dict[str, Any],
    options: Options,
    limit_s: float,
    progress: Progress,
    on_case: OnCase,
    line_of: Callable[[Figures], str],
) -> list[str]:
    """Run `cases` in `jobs` processes, handing each one's figures to `on_case`; the titles of those left out."""
    deadline = time.monotonic() + limit_s
    measured: set[str] = set()

    def on_figures(figures: Figures) -> None:
        measured.add(title_of(figures))
        progress.begin(title_of(figures))
        on_case(figures)
        progress.finish({**figures, "summary": line_of(figures)})

    started = [start(share, options) for share in shares_of(cases, results, jobs)]
    try:
        time_in_turns(wait_until_ready(started, progress, on_figures), deadline, on_figures)
    finally:
        for job in started:
            stop(job)
    return [case.title for case in cases if case.title not in measured]
