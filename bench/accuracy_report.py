"""The accuracy suite's results as a table on the terminal (rich, or Markdown without it) and as Markdown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bench.accuracy_suite import CONTENDERS, MEASURES, WORST_AT_MOST
from bench.format import MISSING, microseconds
from bench.report import PIPE_WIDTH, Cell, heading

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


def table(results: dict[str, Any], without: tuple[str, ...] = ()) -> tuple[list[str], list[list[Cell]]]:
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


def trade_off_table(results: dict[str, Any]) -> tuple[list[str], list[list[Cell]]]:
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


def remarks(results: dict[str, Any]) -> list[str]:
    """What the figures are, the contract's verdicts, and failures."""
    sizes = " and ".join(sorted({f"{case['m']}x{case['n']}" for case in results["cases"]}))
    lines = [
        "Errors against fp64: relative Frobenius norm, then max and mean of |d| / (|x| |weight|.T); results of "
        f"{sizes}. dX and dW are the same product as the gradient of a layer's input and weight."
    ]
    if results["verdicts"]:
        lines += [verdict_line(verdict) for verdict in results["verdicts"]]
    else:
        lines.append("No verdict: the contract is that of CUDA devices of compute capability 9.0.")
    notes = {entry["note"]: name for case in results["cases"] for name, entry in noted(case)}
    return lines + [f"{name} {note}." for note, name in notes.items()]


def noted(case: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The case and its contenders that carry a note."""
    entries = [("case", case), *case["contenders"].items()]
    return [(name, entry) for name, entry in entries if "note" in entry]


def markdown_table(headings: list[str], rows: list[list[Cell]]) -> list[str]:
    """A table's lines in Markdown."""
    return [
        f"| {' | '.join(headings)} |",
        "|" + "|".join("---" if name in LEFT else "---:" for name in headings) + "|",
        *(f"| {' | '.join(cell.text for cell in row)} |" for row in rows),
    ]


def markdown(results: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """The tables and the remarks, without the columns of the headings in `without`."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results, without)), ""]
    if results["trade_off"]:
        lines += [f"{results['trade_off']['shape']}:", "", *markdown_table(*trade_off_table(results)), ""]
    return "\n".join([*lines, *(f"- {line}" for line in remarks(results))])


def rich_table(title: str, headings: list[str], rows: list[list[Cell]]) -> Table:
    """A table for rich, with a line between routes and depths."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in headings:
        grid.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    previous = None
    for row in rows:
        group = [cell.text for cell in row[:2]] if headings[0] == "route" else None
        if previous not in (None, group):
            grid.add_section()
        previous = group
        grid.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    return grid


def show(results: dict[str, Any]) -> None:
    """Print the tables: with rich where it is installed."""
    try:
        from rich.console import Console
    except ImportError:
        print(markdown(results))
        return
    console = Console()
    # A pipe has no width of its own, and rich would fold the columns to 80.
    show_rich(results, console if console.is_terminal else Console(width=PIPE_WIDTH))


def show_rich(results: dict[str, Any], console: Console) -> None:
    """The tables on a rich console, without its first columns of `DROPPABLE` where they do not fit, and the remarks."""
    unbounded = console.options.update(max_width=10_000)  # On its own width, a console measures only what fits.
    count = 0
    while count < len(DROPPABLE):
        grid = rich_table(heading(results), *table(results, DROPPABLE[:count]))
        if console.measure(grid, options=unbounded).maximum <= console.width:
            break
        count += 1
    console.print(rich_table(heading(results), *table(results, DROPPABLE[:count])))
    if results["trade_off"]:
        console.print(rich_table(results["trade_off"]["shape"], *trade_off_table(results)))
    lines = remarks(results)
    if count:
        lines.append(f"No room here for: {', '.join(DROPPABLE[:count])}.")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
