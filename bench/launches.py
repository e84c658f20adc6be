"""Measures one workload on a device: builds it, checks its contenders against fp64, and times them in turns."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import specialized
from bench.accuracy import WRONG_ABOVE, relative_error, rounding
from bench.ceilings import Work, ceilings_for, floor_us
from bench.contenders import AUTOTUNE, COMPILERS, CONTENDERS, CUTFUSE, INTERPRETED, SPECIALIZED, Contender
from bench.format import note_on, one_line
from bench.machine import device_name
from bench.suite import Case, Figures, Session, Turn
from bench.timing import Launch, interleave
from bench.workloads import PRECISIONS, Reference, Run, Workload

# A row or column whose own norm is small is held to this share of the rows' or columns' mean.
LEAST_SHARE = 0.1
# More than the contenders before have left of free memory of this size.
SPARE_RESULTS = 4
# First guesses of what a case takes: tensors, the fp64 check of each contender, a second of timing; and its compilers.
CASE_S = 2.0
COMPILERS_S = {"compile": 5.0, "max-autotune": 40.0}


def poison(result: Any) -> None:
    """Fill a call's result with NaN, and spare memory of its size: the allocator hands one of them out next."""
    for part in result if isinstance(result, tuple) else (result,):
        spare = [torch.empty_like(part) for _ in range(SPARE_RESULTS)]
        for memory in (part.detach(), *spare):
            memory.fill_(torch.nan)


def worst_ratio(differences: Tensor, norms: Tensor) -> float:
    """The largest relative error, of squared norms."""
    least = LEAST_SHARE**2 * norms.mean()
    error = (differences / norms.clamp_min(least)).max().sqrt().item()
    return error if math.isfinite(error) else math.inf


def worst_line_error(result: Tensor, reference: Reference) -> float:
    """The relative error of the worst row or column of a matrix: a wrong tile of 64 columns stands out in its rows.

    Of anything else it is the error of the whole.
    """
    if result.dim() != 2:
        return relative_error(result, reference)
    columns = [torch.zeros(result.shape[1], dtype=torch.float64, device=result.device) for _ in range(2)]
    rows: list[list[Tensor]] = [[], []]
    for start in range(0, reference.rows, reference.step):
        stop = min(start + reference.step, reference.rows)
        expected = reference.compute(start, stop)
        squares = (result[start:stop].double() - expected).square(), expected.square()
        for own, column, square in zip(rows, columns, squares, strict=True):
            own.append(square.sum(1))
            column += square.sum(0)
    by_row = worst_ratio(*(torch.cat(own) for own in rows))
    return max(by_row, worst_ratio(*columns))


def chosen_path(explain: Callable[[], Any]) -> str:
    """What cutfuse.explain says would run first."""
    try:
        explanation = explain()
    except Exception as error:  # The explanation is a label in the results; its failure is shown there.
        return f"explain failed: {one_line(error)}"
    return ": ".join((explanation.path, *explanation.steps[:1]))


@dataclass
class Prepared:
    """A case whose contenders are compiled and checked: their entries, and the launches of those that are right."""

    precision: str
    workload: Workload
    session: Session
    entries: dict[str, Figures] = field(default_factory=dict)
    launches: dict[str, Launch] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Compile and check a contender, if it has anything to run; what cutfuse warns of is noted."""
        entry: Figures = {}
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = self.checked(CONTENDERS[name], entry)
        except Exception as error:  # One contender's failure (out of memory, no compiler) must not lose the others'.
            self.entries[name] = note_on(error)
            return
        if run is None:
            return
        self.entries[name] = entry
        if name in CUTFUSE and caught:
            entry["warned"] = str(caught[-1].message)[:200]
        if "note" not in entry:
            self.launches[name] = run.launch
            if run.explain:
                entry["path"] = chosen_path(run.explain)

    def checked(self, contender: Contender, entry: Figures) -> Run | None:
        """Run a contender once (which compiles it) and compare with fp64, cutfuse's chains again over memory of NaN."""
        before = time.perf_counter()
        run = contender.run(self.workload)
        if run is None:
            return None
        result = self.workload.collect(run.launch())
        self.session.clock.wait()
        if contender.name in COMPILERS:
            entry["compile_s"] = time.perf_counter() - before
        entry["error"] = relative_error(result, run.reference)
        entry["rounding"] = rounding(result.dtype)
        del result
        limit = WRONG_ABOVE[self.precision]
        if entry["error"] > limit:
            entry["note"] = f"wrong: relative error {entry['error']:.1e} against fp64"
        elif contender.name in (INTERPRETED, SPECIALIZED):
            poison(run.launch())
            error = worst_line_error(self.workload.collect(run.launch()), run.reference)
            if error > limit:
                entry["note"] = f"wrong: relative error {error:.1e} of a row or column"
        return run


def prepare(
    build: Callable[[torch.device], Workload],
    precision: str,
    contenders: Sequence[str],
    work: Work | None,
    effort: float,
    session: Session,
) -> Turn:
    """Build a case, and compile and check its contenders; what times them.

    max-autotune chooses its kernels by timing them, so it is compiled in the turn in which the case is timed.
    """
    names = [name for name in contenders if name in session.contenders]
    with torch.no_grad(), PRECISIONS[precision].active():
        prepared = Prepared(precision, build(session.device), session)
        for name in names:
            if name != AUTOTUNE:
                prepared.add(name)
    return partial(timed, prepared, AUTOTUNE in names, work, effort)


def timed(prepared: Prepared, has_autotune: bool, work: Work | None, effort: float) -> Figures:
    """Time every contender of a prepared case; its figures as JSON holds them."""
    session, entries = prepared.session, prepared.entries
    with torch.no_grad(), PRECISIONS[prepared.precision].active():
        if has_autotune:
            prepared.add(AUTOTUNE)
        launches, share = prepared.launches, session.effort.scaled(effort)
        specialized.wait()  # Until its epilogues are compiled a call interprets them: that is no call's usual time.
        timings = interleave(launches, session.clock, share, session.seed) if launches else {}
    for name, timing in timings.items():
        entries[name].update(asdict(timing))
    ordered = {name: entries[name] for name in CONTENDERS if name in entries}
    if work is None:
        return {"contenders": ordered}
    ceilings = ceilings_for(device_name(session.device))
    return {"floor_us": floor_us(work, prepared.precision, ceilings), "contenders": ordered}


def launch_case(
    key: tuple[str, str, str, str],
    build: Callable[[torch.device], Workload],
    contenders: Sequence[str],
    work: Work | None = None,
    effort: float = 1.0,
    about: Figures | None = None,
) -> Case:
    """A case whose contenders are launches on one workload. `effort`: the share of a case's time that it is given."""
    seconds = CASE_S + sum(guess for name, guess in COMPILERS_S.items() if name in contenders)
    own = partial(prepare, build, key[3], tuple(contenders), work, effort)
    return Case(*key, own, seconds * effort, about or {})
