"""Measures one case of the chains suite on a device: builds, checks against fp64, and times contenders in turns."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench import chain_memory, chain_start
from bench.accuracy import WRONG_ABOVE
from bench.ceilings import Ceilings
from bench.chain_cases import LINEAR, MEMORY, NO_WORK, REDUCE, START, Case
from bench.chain_check import poison, worst_line_error
from bench.chain_contenders import CUTFUSE, contender
from bench.chain_workloads import ChainWorkload
from bench.contenders import Contender
from bench.progress import Progress
from bench.runner import check, chosen_path
from bench.specialized import SPECIALIZED, in_mode
from bench.timing import Clock, Effort, Launch, interleave
from bench.workloads import PRECISIONS


@dataclass(frozen=True)
class Options:
    """How cases are measured."""

    device: torch.device
    contenders: tuple[str, ...]
    effort: Effort
    ceilings: Ceilings | None
    seed: int = 0


def memory_us(case: Case, ceilings: Ceilings | None) -> float | None:
    """Microseconds of the case's least traffic at the ceiling: of reading before a reduction, else of copying."""
    if ceilings is None:
        return None
    moved = case.work.read_bytes + case.work.written_bytes
    return 1e6 * moved / (ceilings.read if case.group == REDUCE else ceilings.copy)


def note_on_poisoned(case: Case, workload: ChainWorkload, launch: Launch) -> str:
    """Why a call that gave a right result is wrong after all: in one row or column, or where it does not write."""
    poison(launch())
    error = worst_line_error(workload.collect(launch()), workload.reference)
    return f"wrong: relative error {error:.1e} of a row or column" if error > WRONG_ABOVE[case.precision] else ""


def checked(case: Case, own: Contender, workload: ChainWorkload, clock: Clock) -> tuple[dict[str, Any], Launch | None]:
    """A contender's entry, and its launch where its result is right; what cutfuse warned of is noted."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entry, launch = check(case, own, workload, clock)
    if own.name not in CUTFUSE or launch is None:
        return entry, launch
    if caught:
        entry["warned"] = str(caught[-1].message)[:200]
    note = note_on_poisoned(case, workload, launch)
    return ({**entry, "note": note}, None) if note else (entry, launch)


@dataclass
class Prepared:
    """A case whose contenders are compiled and checked: their entries, and the launches of those that are right."""

    case: Case
    workload: ChainWorkload
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    launches: dict[str, Launch] = field(default_factory=dict)

    def add(self, names: Sequence[str], options: Options, clock: Clock, progress: Progress) -> None:
        """Compile and check those contenders of the case that are among `names`."""
        with torch.no_grad(), PRECISIONS[self.case.precision].active():
            for name in (name for name in self.case.contenders if name in names):
                progress.stage(name)
                entry, launch = checked(self.case, contender(name, self.workload), self.workload, clock)
                if entry:
                    self.entries[name] = entry
                if launch is not None:
                    self.launches[name] = launch


def prepare(case: Case, names: Sequence[str], options: Options, clock: Clock, progress: Progress) -> Prepared:
    """Build a case, and compile and check those of its contenders that are among `names`."""
    assert case.build is not None
    with torch.no_grad(), PRECISIONS[case.precision].active():
        prepared = Prepared(case, case.build(options.device))
    prepared.add(names, options, clock, progress)
    return prepared


def timed(prepared: Prepared, options: Options, clock: Clock, progress: Progress) -> dict[str, Any]:
    """Time every contender of a prepared case; its figures as JSON holds them."""
    case, entries = prepared.case, prepared.entries
    figures: dict[str, Any] = {"contenders": entries}
    with torch.no_grad(), PRECISIONS[case.precision].active():
        if case.work != NO_WORK:
            figures["memory_us"] = memory_us(case, options.ceilings)
        if case.group == LINEAR and any(name in CUTFUSE for name in entries):
            figures["path"] = in_mode(SPECIALIZED, lambda: chosen_path(prepared.workload)[0])()
        progress.stage("timing")
        launches = prepared.launches
        timings = interleave(launches, clock, options.effort, options.seed) if launches else {}
    for name, timing in timings.items():
        entries[name].update(asdict(timing))
    return figures


def run_case(case: Case, options: Options, clock: Clock, progress: Progress) -> dict[str, Any]:
    """Measure a case; its figures as JSON holds them."""
    if case.group == START:
        progress.stage("processes")
        return chain_start.run_case(case)
    if case.group == MEMORY:
        progress.stage("training steps")
        meter = chain_memory.CudaMeter(options.device)
        return chain_memory.measure(case.size, PRECISIONS[case.precision].dtype, options.device, meter)
    return timed(prepare(case, options.contenders, options, clock, progress), options, clock, progress)
