"""The chains suite in several processes: `jobs.py` with the suite's own part.

max-autotune chooses its kernels by timing them, so it is compiled in the turn in which a case is timed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.case_loop import Figures
from bench.chain_cases import Case, all_cases
from bench.chain_contenders import AUTOTUNE
from bench.chain_run import Options, Prepared, prepare, timed
from bench.device_turns import DeviceTurns
from bench.jobs import Jobs, OnCase, Record, Turn, Worker, processors
from bench.progress import Progress

# Each process has its graphs of the functions that all workloads share; PyTorch's limit is eight.
GRAPHS = 1024


class ChainWorker(Worker[Case]):
    """Prepares and times chains in one of the processes, which draws them again."""

    def __init__(
        self, drawn: tuple[bool, bool, int], options: Options, compile_threads: int, turns: DeviceTurns
    ) -> None:
        super().__init__(turns, options.device, compile_threads)
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = GRAPHS
        self.drawn = drawn
        self.options = options

    def cases(self) -> list[Case]:
        """The suite's: `drawn` is whether they are small, whether they are few, and the seed."""
        return list(all_cases(*self.drawn))

    def prepare(self, case: Case) -> Turn | Figures:
        """Compile and check everything but max-autotune."""
        names = tuple(name for name in self.options.contenders if name != AUTOTUNE)
        return partial(self.time, prepare(case, names, self.options, self.clock, Progress(0)))

    def time(self, prepared: Prepared) -> Figures:
        """The case's figures: max-autotune is compiled where the case has it, and all contenders are timed."""
        if AUTOTUNE in self.options.contenders:
            prepared.add((AUTOTUNE,), self.options, self.clock, Progress(0))
        return {**prepared.case.as_dict(), **timed(prepared, self.options, self.clock, Progress(0))}

    def make_room(self, is_idle: bool) -> None:
        """Give memory back. Raises where a kernel's fault has cost the process its device: no later case is timed."""
        del is_idle
        self.clock.wait()
        if self.options.device.type == "cuda":
            torch.cuda.empty_cache()


def shares_of(cases: Sequence[Case], jobs: int) -> list[list[Case]]:
    """The cases dealt out in turns, those with max-autotune first, so that every process has as many of them."""
    order = sorted(cases, key=lambda case: not case.is_autotuned)
    return [order[place::jobs] for place in range(min(jobs, len(order)))]


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
    record = Record(progress, on_case, line_of)
    small, quick, seed = (results["settings"][name] for name in ("small", "quick", "seed"))
    make = partial(ChainWorker, (small, quick, seed), options, max(1, processors() // 4))
    shares = shares_of(cases, jobs)
    own: Jobs[Case]
    with Jobs(make, len(shares), time.monotonic() + limit_s, record) as own:
        own.time(own.prepare(dict(zip(own.members, map(deque, shares), strict=False))))
    return record.left_out(cases)
