"""Whether a suite's goals are met: a line for each, of the figures of its cases; then the report of its results."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.suite import Figures, Goal, Results, Suite, suite_of, title_of
from bench.tables import KEY, MISSING, Table, markdown, ratio
from bench.workloads import PRECISIONS, rounding

Chosen = Callable[[Figures], bool]
Value = Callable[[Figures], float | None]

# Goals are stated for this card and the full sizes; elsewhere there is no verdict.
TARGET_DEVICE = "NVIDIA H200"
MEAN, WORST = "geometric mean", "worst"
MET, MISSED, INCOMPLETE, NOT_MEASURED = VERDICTS = ("met", "missed", "incomplete", "not measured")


def figure_of(case: Figures, contender: str, name: str = "median_us") -> float | None:
    """A contender's figure, by default its microseconds; None where it was not measured."""
    value: float | None = case["contenders"].get(contender, {}).get(name)
    return value


def least(case: Figures, names: Sequence[str], figure: str = "median_us") -> float | None:
    """The least figure of several contenders, of those for which it was measured: by default the fastest one's time."""
    return min((value for name in names if (value := figure_of(case, name, figure)) is not None), default=None)


def quotient(own: float | None, other: float | None) -> float | None:
    """One figure over another; None where one is missing, and 1 where both are nothing."""
    if own is None or other is None:
        return None
    return own / other if other else 1.0 if own == 0 else math.inf


def value_of(contender: str, figure: str, unit: float = 1.0) -> Value:
    """A goal's value: a contender's figure, in so many of what it is measured in."""
    return lambda case: quotient(figure_of(case, contender, figure), unit)


def over(own: Sequence[str], others: Sequence[str], figure: str = "median_us") -> Value:
    """A goal's value: the least figure of some contenders over that of others, by default of their times."""
    return lambda case: quotient(least(case, own, figure), least(case, others, figure))


def share_of_error(case: Figures, own: str, base: str) -> float | None:
    """A contender's error over another's and one rounding: the largest share, of the result and of the gradients."""
    half = rounding(PRECISIONS[case["precision"]].dtype)
    shares = []
    for name in ("error", "gradient_error"):
        error, other = (figure_of(case, contender, name) for contender in (own, base))
        if error is not None and other is not None:
            shares.append(error / (other + half))
    return max(shares, default=None)


def cases_with(*also: Chosen, **wanted: str | Sequence[str]) -> Chosen:
    """Chooses the cases whose fields have these values, each one or several, or any where it is empty; and `also`."""
    fields = {name: (value,) if isinstance(value, str) else value for name, value in wanted.items() if value}
    return lambda case: all(case[name] in own for name, own in fields.items()) and all(holds(case) for holds in also)


@dataclass(frozen=True)
class Line:
    """A goal, the cases that were measured with their values, of how many, and what follows.

    verdict: None where the goal does not apply to the run.
    """

    goal: Goal
    cells: Sequence[tuple[float, Figures]]
    expected: int
    value: float | None = None
    worst: Figures | None = None
    verdict: str | None = None

    @property
    def counted(self) -> str:
        """Of how many cases the value is the mean or the worst, and how many there should be where some are missing."""
        if not self.cells:
            return f"0 of {self.expected}"
        count = len(self.cells) if len(self.cells) == self.expected else f"{len(self.cells)} of {self.expected}"
        measure = "mean" if self.goal.measure == MEAN else "worst"
        return "1 case" if count == 1 else f"{measure} of {count}"

    @property
    def where(self) -> str:
        """The worst case, without its group where all cases are of one; empty where there is none."""
        groups = {case["group"] for _, case in self.cells}
        names = KEY[len(groups) == 1 :]
        return ", ".join(self.worst[name] for name in names if self.worst.get(name)) if self.worst else ""


def share_of_limit(goal: Goal, value: float, case: Figures) -> float:
    """How much of what the goal allows a case takes: above 1 it is too much. Without a limit it is the value."""
    limit = goal.allowed(case) if goal.allowed else goal.limit
    if limit is None:
        return value
    own, allowed = (limit, value) if goal.is_least else (value, limit)
    return own / allowed if allowed else float("inf") if own else 0.0


def judged(goal: Goal, cases: Sequence[Figures], expected: int, gives_verdict: bool) -> Line:
    """The goal's line, of the figures of a run's cases."""
    cells = [(value, case) for case in cases if goal.covers(case) and (value := goal.value(case)) is not None]
    if not cells:
        return Line(goal, cells, expected, verdict=NOT_MEASURED if gives_verdict and goal.limit is not None else None)
    worst = None
    if goal.measure == MEAN:
        value = statistics.geometric_mean(own for own, _ in cells)
        share = share_of_limit(goal, value, cells[0][1])
    else:
        value, worst = max(cells, key=lambda cell: share_of_limit(goal, *cell))
        share = share_of_limit(goal, value, worst)
    verdict = None
    if gives_verdict and goal.limit is not None:
        verdict = INCOMPLETE if len(cells) < expected else MET if share <= 1 else MISSED
    return Line(goal, cells, expected, value, worst, verdict)


def judges(suite: Suite, results: Results) -> bool:
    """Whether a run is held to the goals: one on the target device, and of the whole suite."""
    settings = results["settings"]
    is_whole = not settings["small"] and (suite.judges_quick or not settings["quick"])
    return is_whole and str(results["machine"]["device"]) == TARGET_DEVICE


def lines_of(results: Results) -> list[Line]:
    """Every line of the suite's table."""
    suite = suite_of(results["suite"])
    settings = results["settings"]
    is_quick = settings["quick"] and suite.judges_quick
    every: list[dict[str, Any]] = [case.as_dict() for case in suite.cases(False, is_quick, settings["seed"])]
    gives_verdict = judges(suite, results)
    return [judged(goal, results["cases"], sum(map(goal.covers, every)), gives_verdict) for goal in suite.goals]


MOST_TITLES = 8  # A note on more cases than this gives their number only.


def heading(results: Results) -> str:
    """What was run where."""
    machine = results["machine"]
    versions = [f"torch {machine['torch']}"]
    versions += [f"{name} {machine[key]}" for name, key in (("CUDA", "cuda"), ("driver", "driver")) if machine.get(key)]
    commit, _, changes = (machine.get("commit") or "unknown").partition(" ")
    versions += [f"cutfuse {machine['cutfuse']}", f"commit {commit[:12]} {changes}".rstrip()]
    return f"{results['suite']} on {machine['device']} ({', '.join(versions)}), {machine['date']}"


def value_text(goal: Goal, value: float | None) -> str:
    """A line's value or limit in its unit."""
    if value is None:
        return MISSING
    return f"{value:.3g}{goal.unit}" if goal.unit or value in (0.0, float("inf")) else ratio(value)


def target_text(line: Line) -> str:
    """The limit and the verdict."""
    goal = line.goal
    if goal.limit is None:
        return MISSING
    limit = f"{'≥' if goal.is_least else '≤'} {goal.limit:.3g}{goal.unit}"
    return f"{line.verdict} ({limit})" if line.verdict else limit


def lines_table(results: Results, is_short: bool = False) -> Table:
    """A row for each goal; unless it `is_short`, with the worst case."""
    lines = lines_of(results)
    columns = {
        "what": [line.goal.what for line in lines],
        "over": [line.goal.against or MISSING for line in lines],
        "ratio": [value_text(line.goal, line.value) for line in lines],
        "target": [target_text(line) for line in lines],
        "cases": [line.counted for line in lines],
    }
    if not is_short:
        columns["worst at"] = [line.where if line.expected > 1 else MISSING for line in lines]
    return Table(heading(results), columns)


def verdict_line(results: Results) -> str:
    """The verdicts in total."""
    verdicts = Counter(line.verdict for line in lines_of(results) if line.verdict)
    if verdicts:
        return f"Targets: {', '.join(f'{verdicts[name]} {name}' for name in VERDICTS)}."
    if results["machine"]["device"] == TARGET_DEVICE:
        return "No verdict: the targets are those of the whole suite."
    return f"No verdict: the targets are those of an {TARGET_DEVICE}."


def note_lines(cases: list[dict[str, Any]]) -> list[str]:
    """Notes on contenders and cases, each once with the cases that it is on; and what cutfuse warned of."""
    found: dict[str, list[str]] = {}
    for case in cases:
        entries = case["contenders"].items()
        notes = [f"{name} {entry['note']}" for name, entry in entries if "note" in entry]
        notes += sorted({f"cutfuse warned: {entry['warned']}" for _, entry in entries if "warned" in entry})
        for note in [*notes, *([case["note"]] if case.get("note") else [])]:
            found.setdefault(note, []).append(title_of(case))
    return [
        f"{note} ({'; '.join(titles) if len(titles) <= MOST_TITLES else f'{len(titles)} cases'})."
        for note, titles in found.items()
    ]


def remarks(results: Results) -> list[str]:
    """What the figures are, the verdicts in total, failures, and what is missing."""
    suite, settings = suite_of(results["suite"]), results["settings"]
    lines = [*suite.about, *suite.notes(results), verdict_line(results), *note_lines(results["cases"])]
    lines.append(
        f"Cases: {len(results['cases'])} of {len(suite.cases_of(results))}, drawn with seed {settings['seed']}."
    )
    if settings["small"] or settings["quick"]:
        lines.append("A quick run or one of small sizes: fewer cases or smaller ones, and fewer rounds.")
    if results["machine"].get("capability") and not results["machine"]["cutfuse_kernels"]:
        lines.append("cutfuse has no CUDA kernels in this build: its figures are those of composed PyTorch operations.")
    if results["left_out"]:
        lines.append(f"Cases left out by the time limit: {'; '.join(results['left_out'])}.")
    return lines


def tables_of(results: Results, is_short: bool = False) -> list[Table]:
    """The table of the goals, and unless it `is_short` those of the rows."""
    makes = () if is_short else suite_of(results["suite"]).tables
    return [lines_table(results, is_short), *(make(results) for make in makes)]


def as_markdown(results: Results, is_short: bool = False) -> str:
    """Tables and remarks in Markdown."""
    return markdown(tables_of(results, is_short), remarks(results))
