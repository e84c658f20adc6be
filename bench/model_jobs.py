"""The models suite in several processes: `jobs.py` with the suite's own part.

Models fill the device's memory, so that what is timed runs in waves of one case for each process, after whose turns its
memory is free again. What is not timed in turns runs side by side before: errors, then compilations.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from bench.case_loop import Figures
from bench.device_turns import DeviceTurns
from bench.jobs import Jobs, OnCase, Record, Turn, Worker, failure, processors
from bench.model_cases import COMPILATION, ERRORS, PASSES, Case, all_cases, weight_of
from bench.model_run import Options, Prepared, prepare, run_untimed, timed
from bench.model_suite import free, start_compiler
from bench.progress import Progress


class ModelWorker(Worker[Case]):
    """Prepares and times models in one of `jobs` processes."""

    def __init__(self, is_small: bool, jobs: int, options: Options, turns: DeviceTurns) -> None:
        super().__init__(turns, options.device, compile_threads=max(1, processors() // jobs))
        self.is_small = is_small
        self.jobs = jobs
        self.options = options
        if any(contender.backend for contender in options.contenders):
            start_compiler(options.device)

    def cases(self) -> list[Case]:
        """The suite's, of whole models or of small ones."""
        return all_cases(self.is_small)

    def prepare(self, case: Case) -> Turn | Figures:
        """Build the model, and compile and warm up every contender; all of a case that is not timed in turns."""
        if case.kind in PASSES:
            return partial(self.time, prepare(case, self.options, self.clock, Progress(0), self.turns.alone))
        figures = {**case.as_dict(), **run_untimed(case, self.options, self.clock, Progress(0))}
        return {**figures, "jobs": self.jobs} if case.kind == COMPILATION else figures

    def time(self, prepared: Prepared) -> Figures:
        """The case's figures."""
        return {**prepared.case.as_dict(), **timed(prepared, self.options, self.clock, Progress(0))}

    def make_room(self, is_idle: bool) -> None:
        """Free the case's memory, or where it waits for its turn, what compiling it has left. May raise."""
        if is_idle:
            free(self.options.device)
        elif self.options.device.type == "cuda":
            torch.cuda.empty_cache()


def waves_of(cases: Sequence[Case], jobs: int) -> list[list[Case]]:
    """The cases in waves of at most `jobs`, so that all waves have about as many and are about as heavy."""
    count = -(-len(cases) // jobs)
    waves: list[list[Case]] = [[] for _ in range(count)]
    for case in sorted(cases, key=weight_of, reverse=True):
        with_room = [wave for wave in waves if len(wave) * count < len(cases)]
        min(with_room, key=lambda wave: sum(map(weight_of, wave))).append(case)
    return waves


def record_lost(own: Jobs[Case]) -> None:
    """Make failures of the cases that ended their processes."""
    for case, status in own.lost:
        own.record.take(failure(case, RuntimeError(f"the process ended with status {status}")))
    own.lost.clear()


def run_side_by_side(own: Jobs[Case], cases: Iterable[Case]) -> None:
    """Run cases that are not timed in turns, each in the process that is free first."""
    queue = deque(cases)
    own.fill()
    own.prepare(dict.fromkeys(own.members, queue))
    record_lost(own)


def run_waves(own: Jobs[Case], cases: Sequence[Case]) -> None:
    """Prepare and time one wave after the other; none that would not be prepared before the time is over."""
    longest = 0.0
    for wave in waves_of(cases, own.count):
        began = time.monotonic()
        if began + longest > own.deadline:
            return
        own.fill()
        ready = own.prepare({job: deque([case]) for job, case in zip(own.members, wave, strict=False)})
        longest = max(longest, time.monotonic() - began)
        own.time(ready)
        record_lost(own)


def run_jobs(
    cases: Sequence[Case],
    jobs: int,
    is_small: bool,
    options: Options,
    limit_s: float,
    progress: Progress,
    on_case: OnCase,
    line_of: Callable[[Figures], str],
) -> list[str]:
    """Run `cases` in `jobs` processes, handing each one's figures to `on_case`; the titles of those left out."""
    record = Record(progress, on_case, line_of)
    count = min(jobs, len(cases))
    own: Jobs[Case]
    with Jobs(partial(ModelWorker, is_small, count, options), count, time.monotonic() + limit_s, record) as own:
        for kind in (ERRORS, COMPILATION):
            # The last models are the largest, and begin first, so that none of them runs alone at the end.
            run_side_by_side(own, [case for case in reversed(cases) if case.kind == kind])
        run_waves(own, [case for case in cases if case.kind in PASSES])
    return record.left_out(cases)
