"""The host suite's results as tables: the lines with their verdicts, and every case."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.cases import TARGET_DEVICE
from bench.format import MISSING, microseconds, ratio
from bench.host_suite import CUTFUSE, MEAN, PYTORCH
from bench.host_suite import ratio as ratio_of
from bench.host_timing import HOST, TURNS
from bench.report import heading, note_lines, time_cell
from bench.tables import Cell, Grid, grid_of, markdown_table, print_fitting, print_lines, rich_console, rich_table

if TYPE_CHECKING:
    from rich.table import Table

LEFT = ("line", "call", "over", "time", "shape", "precision", "target")  # columns of text, aligned left
# What a narrow terminal goes without, the first soonest.
DROPPABLE = ("line", "over", "PyTorch us", "cutfuse us", "shape")


def shape_cell(line: dict[str, Any]) -> Cell:
    """The one shape of a line, or what of how many."""
    chosen = ", ".join(part for part in (line["shape"], line["precision"]) if part)
    if line["cases"] == 0:
        return Cell(chosen or MISSING)
    if line["cases"] == 1 and line["where"]:
        return Cell(line["where"])
    at = f" at {line['where']}" if line["where"] else f", {chosen}" if chosen else ""
    return Cell(f"{line['cases']} shapes: {line['measure']}{at}")


def target_cell(line: dict[str, Any]) -> Cell:
    """The limit and the verdict."""
    if line["at_most"] is None:
        return Cell(MISSING)
    limit = f"≤ {line['at_most']:g}"
    if line["verdict"] is None:
        return Cell(limit)
    return Cell(f"{line['verdict']} ({limit})", style="green" if line["verdict"] == "met" else "bold red")


def table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """The lines; columns named in `without` are left out."""
    lines = results["lines"]
    columns = {
        "line": [Cell(str(line["line"])) for line in lines],
        "call": [Cell(line["group"]) for line in lines],
        "over": [Cell(line["rival"]) for line in lines],
        "time": [Cell(line["time"]) for line in lines],
        "shape": [shape_cell(line) for line in lines],
        "PyTorch us": [Cell(microseconds(line["pytorch_us"])) for line in lines],
        "cutfuse us": [Cell(microseconds(line["cutfuse_us"])) for line in lines],
        "ratio": [Cell(ratio(line["ratio"]), style="bold") for line in lines],
        "target": [target_cell(line) for line in lines],
    }
    return grid_of(columns, without)


def case_table(results: dict[str, Any]) -> Grid:
    """Every case with both times."""
    times = {line["group"]: line["time"] for line in results["lines"]}
    rows = [
        [
            Cell(case["group"]),
            Cell(times[case["group"]]),
            Cell(case["shape"]),
            Cell(case["precision"]),
            *(time_cell(case["contenders"].get(name)) for name in (PYTORCH, CUTFUSE)),
            Cell(ratio(ratio_of(case))),
        ]
        for case in results["cases"]
    ]
    return ["call", "time", "shape", "precision", "PyTorch us", "cutfuse us", "ratio"], rows


def explanations(results: dict[str, Any]) -> list[str]:
    """What the figures are."""
    calls = TURNS[HOST].timed_calls
    lines = [
        f"host: the CPU's time to issue a call, of {calls} calls in a row from an empty queue on; the device is waited "
        "for outside of that time.",
        "whole: host and device, of one call until the device is done; waiting for it is inside.",
        "Medians in microseconds, the two taking turns in random order, garbage collector off, every cache warm. "
        f"Ratio: cutfuse's time over PyTorch's in this run, the largest of the shapes where it is not the {MEAN}; the "
        "times are those of that shape.",
    ]
    if results["settings"]["quick"]:
        lines.append("A quick run: fewer shapes, and fewer turns of each.")
    return lines


def verdict_line(results: dict[str, Any]) -> str:
    """The verdicts in total."""
    verdicts = Counter(line["verdict"] for line in results["lines"] if line["verdict"])
    if not verdicts:
        return f"No verdict: the targets are those of an {TARGET_DEVICE}."
    counts = ", ".join(f"{verdicts.get(name, 0)} {name}" for name in ("met", "missed", "not measured"))
    return f"Targets: {counts}."


def remarks(results: dict[str, Any]) -> list[str]:
    """What the figures are, the verdicts in total, failures, and what was left out."""
    return [*explanations(results), verdict_line(results), *note_lines(results["cases"]), *limit_lines(results)]


def limit_lines(results: dict[str, Any]) -> list[str]:
    """That the build has no kernels, and which cases the time did not allow."""
    lines = []
    if results["machine"].get("capability") and not results["machine"]["cutfuse_kernels"]:
        lines.append("cutfuse has no CUDA kernels in this build: its figures are those of composed PyTorch operations.")
    if results["left_out"]:
        lines.append(f"Cases left out by the time limit: {'; '.join(results['left_out'])}.")
    return lines


def summary(results: dict[str, Any]) -> str:
    """The lines and the remarks as Markdown, for the README."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results), LEFT), ""]
    return "\n".join([*lines, *(f"- {line}" for line in remarks(results))])


def markdown(results: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """The lines without the columns of the headings in `without`, every case, and the remarks."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results, without), LEFT), ""]
    lines += [*markdown_table(*case_table(results), LEFT), ""]
    return "\n".join([*lines, *(f"- {line}" for line in remarks(results))])


def rich_lines(results: dict[str, Any], without: tuple[str, ...]) -> Table:
    """The table of the lines for rich."""
    return rich_table(heading(results), *table(results, without), LEFT)


def show(results: dict[str, Any]) -> None:
    """Print the lines: with rich where it is installed."""
    console = rich_console()
    if console is None:
        print(summary(results))
        return
    dropped = print_fitting(console, partial(rich_lines, results), DROPPABLE)
    print_lines(console, [*remarks(results), *dropped])
