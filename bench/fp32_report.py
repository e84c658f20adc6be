"""The fp32 suite's results as tables: the lines with their verdicts, the grids' speed-ups, error against time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bench import fp32_cases as suite
from bench.accuracy_report import number, print_trade_off, trade_off_lines
from bench.cases import TARGET_DEVICE
from bench.format import MISSING
from bench.fp32_suite import MEAN, NOISE, speed_ups
from bench.report import LABELS, heading, note_lines, time_cell
from bench.tables import Cell, Grid, markdown_table, print_fitting, print_lines, rich_console, rich_table

if TYPE_CHECKING:
    from rich.table import Table

LEFT = ("line", "case", "shape", "weights", "target")  # columns of text, aligned left
# What a narrow terminal goes without, the first soonest.
DROPPABLE = ("error PyTorch", "error cutfuse", "max-autotune us", "torch.compile us", "eager us", "torch.mm us", "line")
RIVALS = (suite.CUBLAS, *suite.PYTORCH)
WEIGHTS = {suite.PLAIN: "plain", suite.KEPT: "planes kept"}
# The grids of cells, and the contenders whose speed-ups are shown of each.
GRIDS = ((suite.PRODUCT, suite.PLAIN), (suite.PRODUCT, suite.KEPT), (suite.SKINNY, suite.PLAIN))
OWN_CUBLAS = "*"


def times(value: float | None) -> str:
    """A speed-up."""
    return MISSING if value is None else f"{value:.2f}"


def error_of(case: dict[str, Any] | None, names: tuple[str, ...]) -> Cell:
    """The error of the first of `names` that ran."""
    entries = case["contenders"] if case else {}
    errors = [entries[name]["error"] for name in names if "error" in entries.get(name, {})]
    return Cell(number(errors[0]) if errors else MISSING)


def target_cell(line: dict[str, Any]) -> Cell:
    """The limit and the verdict, with the tolerance where one is granted."""
    limit = f"≥ {line['at_least']:.1f}"
    if line["noise"]:
        limit += f"; {line['noise']} where cuBLAS ran"
    verdict = line["verdict"]
    if verdict is None:
        return Cell(limit)
    return Cell(f"{verdict} ({limit})", style="green" if verdict == "met" else "bold red")


def shape_of(line: dict[str, Any], case: dict[str, Any] | None) -> str:
    """A case's shape, or what of how many cells."""
    if line["measure"]:
        at = f" at {line['where']}" if line["where"] else ""
        return f"{line['cells']} shapes: {line['measure']}{at}"
    return case["shape"] if case else MISSING


def table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """The lines; columns that are empty or named in `without` are left out."""
    lines = results["lines"]
    by_group = {case["group"]: case for case in results["cases"]}
    cases = [None if line["measure"] else by_group.get(line["group"]) for line in lines]

    def column(name: str) -> list[Cell]:
        """A contender's times; a line's own where `name` is empty."""
        cells = []
        for line, case in zip(lines, cases, strict=True):
            shown = (name in line["rivals"] if name else True) and case is not None
            cells.append(time_cell(case["contenders"].get(name or line["contender"]) if shown and case else None))
        return cells

    columns = {
        "line": [Cell(str(line["line"])) for line in lines],
        "case": [Cell(line["group"]) for line in lines],
        "shape": [Cell(shape_of(line, case)) for line, case in zip(lines, cases, strict=True)],
        "weights": [Cell(WEIGHTS[line["contender"]]) for line in lines],
        **{f"{LABELS.get(name, name)} us": column(name) for name in RIVALS},
        "cutfuse us": column(""),
        "times as fast": [Cell(times(line["speed_up"]), style="bold") for line in lines],
        "error PyTorch": [error_of(case, ("eager", suite.CUBLAS)) for case in cases],
        "error cutfuse": [error_of(case, (line["contender"],)) for line, case in zip(lines, cases, strict=True)],
        "target": [target_cell(line) for line in lines],
    }
    filled = {name: cells for name, cells in columns.items() if any(cell.text != MISSING for cell in cells)}
    kept = {name: cells for name, cells in filled.items() if name not in without}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def cells_of(results: dict[str, Any], group: str, contender: str) -> dict[tuple[int, str], tuple[float, bool]]:
    """A grid's speed-ups, and whether cutfuse ran cuBLAS itself, by M and "NxK"."""
    found = {}
    for cell in speed_ups(results["cases"], group, contender):
        m, rest = cell.shape.split("x", 1)
        found[int(m), rest] = (cell.value, cell.ran_cublas)
    return found


def grid_title(group: str, contender: str) -> str:
    """What a grid shows."""
    return f"{group}, {WEIGHTS[contender]} weights" if contender == suite.PLAIN else f"{group}, {WEIGHTS[contender]}"


def grid_table(results: dict[str, Any], group: str, contender: str) -> Grid:
    """A row for each M, a column for each N x K."""
    found = cells_of(results, group, contender)
    columns = list(dict.fromkeys(rest for _, rest in found))
    rows = []
    for m in dict.fromkeys(m for m, _ in found):
        cells = [found.get((m, rest)) for rest in columns]
        marked = [MISSING if cell is None else times(cell[0]) + OWN_CUBLAS * cell[1] for cell in cells]
        styles = ["red" if cell and cell[0] < NOISE else "" for cell in cells]
        rows.append([Cell(str(m)), *(Cell(text, style=style) for text, style in zip(marked, styles, strict=True))])
    return ["M \\ NxK", *columns], rows


def grids(results: dict[str, Any]) -> dict[str, Grid]:
    """The tables of the grids in which something was measured, by title."""
    found = {grid_title(*which): grid_table(results, *which) for which in GRIDS}
    return {title: grid for title, grid in found.items() if grid[1]}


def explanations(results: dict[str, Any]) -> list[str]:
    """What the figures are."""
    mode = results["settings"].get("mode")
    ours = f'"{mode}"' if mode else "what PyTorch's setting means"
    return [
        'PyTorch is at "highest" throughout: its products are cuBLAS in fp32. Times are medians in microseconds of one '
        "interleaved run; errors are relative, against fp64. Times as fast: the fastest rival's time over cutfuse's.",
        f'cutfuse\'s precision is {ours}, and "{suite.FORCED}" where the case says so.',
        f"Where cutfuse ran cuBLAS itself, the two times are of one kernel, and {NOISE} counts as 1. The worst cell is "
        f"the one furthest below its limit; the {MEAN} takes every cell as measured.",
    ]


def verdict_line(results: dict[str, Any]) -> str:
    """The verdicts in total."""
    verdicts = [line["verdict"] for line in results["lines"] if line["verdict"]]
    if not verdicts:
        return f"No verdict: the targets are those of an {TARGET_DEVICE}."
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("met", "missed", "not measured"))
    return f"Targets: {counts}."


def remarks(results: dict[str, Any]) -> list[str]:
    """What the figures are, the verdicts in total, and failures."""
    lines = [*explanations(results), f"{OWN_CUBLAS}: cutfuse ran cuBLAS itself.", verdict_line(results)]
    lines += note_lines(results["cases"])
    if results["left_out"]:
        lines.append(f"Cases left out by the time limit: {'; '.join(results['left_out'])}.")
    return lines


def summary(results: dict[str, Any]) -> str:
    """The lines and the error against the time as Markdown, for the documentation."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results), LEFT), "", *trade_off_lines(results)]
    return "\n".join([*lines, *(f"- {line}" for line in [*explanations(results), verdict_line(results)])])


def markdown(results: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """The tables and the remarks, the first one without the columns of the headings in `without`."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results, without), LEFT), ""]
    for title, grid in grids(results).items():
        lines += [f"{title}, times as fast as cuBLAS in fp32:", "", *markdown_table(*grid, LEFT), ""]
    return "\n".join([*lines, *trade_off_lines(results), *(f"- {line}" for line in remarks(results))])


def rich_lines(results: dict[str, Any], without: tuple[str, ...]) -> Table:
    """The table of the lines for rich."""
    return rich_table(heading(results), *table(results, without), LEFT)


def show(results: dict[str, Any]) -> None:
    """Print the tables: with rich where it is installed."""
    console = rich_console()
    if console is None:
        print(markdown(results))
        return
    dropped = print_fitting(console, partial(rich_lines, results), DROPPABLE)
    for title, grid in grids(results).items():
        console.print(rich_table(f"{title}: times as fast as cuBLAS in fp32", *grid, LEFT))
    print_trade_off(results, console)
    print_lines(console, [*remarks(results), *dropped])
