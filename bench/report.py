"""A suite's results as tables: its goals with their verdicts, the rows, and what the figures are."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bench.goals import TARGET_DEVICE, VERDICTS, Line, lines_of
from bench.suite import Goal, Results, suite_of, title_of
from bench.tables import MISSING, Table, markdown, ratio

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
