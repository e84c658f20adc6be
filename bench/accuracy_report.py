"""The accuracy suite's results as a table on the terminal (rich, or Markdown without it) and as Markdown."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.accuracy_suite import CONTENDERS, MEASURES, WORST_AT_MOST
from bench.format import MISSING, microseconds
from bench.report import heading
from bench.tables import Cell, Grid, markdown_table, print_fitting, print_lines, rich_console, rich_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RATIO = "guarded / cuBLAS fp32"
LEFT = ("route", "inputs", "contender")  # columns of text, aligned left
# What a narrow terminal goes without, the first soonest.
DROPPABLE = ("bf16", "tf32", "split6", "split3")


def number(value: float | None, digits: str = ".1e") -> str:
    """A figure; JSON has null for infinity."""
    return "inf" if value is None or math.isinf(value) else f"{value:{digits}}"


def errors_cell(entry: dict[str, Any] | None) -> Cell:
    """A contender's errors, in the order of `MEASURES`."""
    if entry is None:
        return Cell(MISSING)
    if "note" in entry:
        return Cell(entry["note"].split(":")[0], style="bold red")
    return Cell(" ".join(number(entry[key]) for key in MEASURES))


def ratios_cell(case: dict[str, Any]) -> Cell:
    """The ratios of "guarded" to cuBLAS fp32, in the order of `MEASURES`: red beyond the contract, yellow above 1."""
    values = [math.inf if case["ratios"][key] is None else case["ratios"][key] for key in MEASURES]
    worst = max(values)
    style = "bold red" if worst > WORST_AT_MOST else "yellow" if worst > 1 else "green"
    return Cell(" ".join(number(value, ".2f") for value in values), style=style)


def table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """The headings, and the cells of every case; columns named in `without` are left out."""
    cases = results["cases"]
    columns: dict[str, list[Cell]] = {
        "route": [Cell(case["route"]) for case in cases],
        "K": [Cell(str(case["k"])) for case in cases],
        "inputs": [Cell(case["distribution"]) for case in cases],
        **{name: [errors_cell(case["contenders"].get(name)) for case in cases] for name in CONTENDERS},
        RATIO: [ratios_cell(case) for case in cases],
    }
    kept = {name: cells for name, cells in columns.items() if name not in without}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def trade_off_table(results: dict[str, Any]) -> Grid:
    """Each contender's time and error on one product."""
    found = (results["trade_off"] or {"contenders": {}})["contenders"]
    base = found.get(CONTENDERS[0], {}).get("median_us")
    rows = []
    for name, entry in found.items():
        if "note" in entry:
            rows.append([Cell(name), Cell(entry["note"].split(":")[0], style="bold red"), Cell(MISSING), Cell(MISSING)])
            continue
        median = entry["median_us"]
        faster = f"{base / median:.2f}" if base else MISSING
        rows.append([Cell(name), Cell(microseconds(median)), Cell(faster), Cell(number(entry["error"]))])
    return ["contender", "us", "times as fast", "error"], rows


def verdict_line(verdict: dict[str, Any]) -> str:
    """One line of the contract."""
    where = f" ({verdict['where']})" if verdict["where"] else ""
    outcome = "met" if verdict["met"] else "missed"
    value = number(verdict["value"], ".3g")
    return f"{verdict['what']}: {value}, at most {verdict['at_most']:g}: {outcome}{where}."


def verdict_lines(results: dict[str, Any]) -> list[str]:
    """The contract's lines."""
    if not results["verdicts"]:
        return ["No verdict: the contract is that of CUDA devices of compute capability 9.0."]
    return [verdict_line(verdict) for verdict in results["verdicts"]]


def remarks(results: dict[str, Any]) -> list[str]:
    """What the figures are, the contract's verdicts, and failures."""
    sizes = " and ".join(sorted({f"{case['m']}x{case['n']}" for case in results["cases"]}))
    lines = [
        "Errors against fp64: relative Frobenius norm, then max and mean of |d| / (|x| |weight|.T); results of "
        f"{sizes}. dX and dW are the same product as the gradient of a layer's input and weight."
    ]
    lines += verdict_lines(results)
    notes = {entry["note"]: name for case in results["cases"] for name, entry in noted(case)}
    return lines + [f"{name} {note}." for note, name in notes.items()]


def noted(case: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The case and its contenders that carry a note."""
    entries = [("case", case), *case["contenders"].items()]
    return [(name, entry) for name, entry in entries if "note" in entry]


def trade_off_title(results: dict[str, Any]) -> str:
    """What the error against the time is of."""
    return f"Error and time of a product of {results['trade_off']['shape']}, normal inputs, weights split on each call"


def trade_off_lines(results: dict[str, Any]) -> list[str]:
    """The error against the time in Markdown."""
    if not results["trade_off"]:
        return []
    return [f"{trade_off_title(results)}:", "", *markdown_table(*trade_off_table(results), LEFT), ""]


def print_trade_off(results: dict[str, Any], console: Console) -> None:
    """The error against the time with rich."""
    if results["trade_off"]:
        console.print(rich_table(trade_off_title(results), *trade_off_table(results), LEFT))


def markdown(results: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """The tables and the remarks, without the columns of the headings in `without`."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results, without), LEFT), ""]
    lines += trade_off_lines(results)
    return "\n".join([*lines, *(f"- {line}" for line in remarks(results))])


def summary_table(results: dict[str, Any]) -> Grid:
    """Of each distribution: the Frobenius errors of its deepest product, and the largest ratio of all its cases."""
    products = [case for case in results["cases"] if case["route"] == "product"]
    deepest = {case["distribution"]: case for case in sorted(products, key=lambda case: case["k"])}
    rows = []
    for name, case in deepest.items():
        ratios = [list(own["ratios"].values()) for own in results["cases"] if own["distribution"] == name]
        largest = max(math.inf if value is None else value for values in ratios for value in values)
        errors = [case["contenders"].get(contender, {}) for contender in CONTENDERS]
        texts = [MISSING if "frobenius" not in entry else number(entry["frobenius"]) for entry in errors]
        rows.append([Cell(name), Cell(str(case["k"])), *map(Cell, texts), Cell(number(largest, ".2f"))])
    return ["inputs", "K", *CONTENDERS, f"largest {RATIO}"], rows


def summary(results: dict[str, Any]) -> str:
    """A row for each distribution, the error against the time and the verdicts as Markdown, for the documentation."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*summary_table(results), LEFT), ""]
    lines += trade_off_lines(results)
    about = (
        "Relative Frobenius errors against fp64 of the deepest product; the largest ratio is that of any measure "
        "(Frobenius norm, max and mean of |d| / (|x| |weight|.T)), depth and route (product, dX, dW)."
    )
    return "\n".join([*lines, *(f"- {line}" for line in [about, *verdict_lines(results)])])


def rich_cases(results: dict[str, Any], without: tuple[str, ...]) -> Table:
    """The table of the cases for rich, with a line between routes and depths."""
    return rich_table(heading(results), *table(results, without), LEFT, grouped_by=2)


def show(results: dict[str, Any]) -> None:
    """Print the tables: with rich where it is installed."""
    console = rich_console()
    if console is None:
        print(markdown(results))
        return
    dropped = print_fitting(console, partial(rich_cases, results), DROPPABLE)
    print_trade_off(results, console)
    print_lines(console, [*remarks(results), *dropped])
