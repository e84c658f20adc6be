"""How figures are written, and tables of text: as Markdown, and with rich as wide as the terminal allows.

Figures have three to four significant digits; a dash stands for what was not measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "-"


def microseconds(value: float | None) -> str:
    """A time in microseconds."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def duration(value_us: float) -> str:
    """A time with its unit, for a plot's label."""
    return f"{value_us / 1000:.2f} ms" if value_us >= 1000 else f"{microseconds(value_us)} µs"


def ratio(value: float | None) -> str:
    """A ratio of two times; small ones need the third digit (1/15 is 0.067, 1/3 is 0.333)."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if value >= 0.5 else f"{value:.3f}"


def error(value: float | None) -> str:
    """A relative error."""
    return MISSING if value is None else f"{value:.1e}"


def figure(entry: dict[str, Any] | None, name: str, text: Callable[[Any], str]) -> str:
    """One figure of a contender; a dash where there is none, or that the contender failed, of which notes say more."""
    if entry is None:
        return MISSING
    if name in entry:
        return text(entry[name])
    return entry["note"].split(":")[0] if "note" in entry else MISSING


def one_line(error: BaseException) -> str:
    """An exception as a note in a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def note_on(error: BaseException) -> dict[str, Any]:
    """The figures of a contender that failed, or of a case: one failure must not lose the others' figures."""
    return {"note": f"failed: {one_line(error)}"}


# What is shown of a contender's figures on a line: the first of these that there is.
SHOWN: dict[str, Callable[[Any], str]] = {
    "median_us": lambda value: f"{microseconds(value)} us",
    "gpu_us": lambda value: f"{microseconds(value)} us",
    "error": error,
    "frobenius": error,
    "cold_s": lambda value: f"{value:.1f} s",
    "wait_s": lambda value: f"{value:.3g} s",
    "peak_bytes": lambda value: f"{value / 1e6:.1f} MB",
    "note": str,
}


def summary(figures: dict[str, Any]) -> str:
    """One line on a finished case."""
    parts = []
    for name, entry in figures["contenders"].items():
        shown = next((text(entry[key]) for key, text in SHOWN.items() if key in entry), "")
        host = f" (host {microseconds(entry['host_us'])})" if "host_us" in entry else ""
        parts.append(f"{name} {shown}{host}")
    if figures.get("note"):
        parts.append(figures["note"])
    return f"{', '.join(parts)} ({figures['seconds']:.1f} s)"


Figures = dict[str, Any]
PIPE_WIDTH = 240
NUMBER = re.compile(r"[\d.,e+\-/* ]*(?:inf)?[\d.e+\-/* ]*s?(?: to [\d.]+)?")
STYLES = {"met": "green", "missed": "bold red", "incomplete": "bold red", "not measured": "bold red"}
STYLES |= dict.fromkeys(("failed", "wrong"), "bold red")


@dataclass(frozen=True)
class Table:
    """A title and columns by their headings, all of one length."""

    title: str
    columns: Mapping[str, Sequence[str]]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells by rows."""
        return list(zip(*self.columns.values(), strict=True))

    @property
    def are_numbers(self) -> list[bool]:
        """Of each column, whether it is of numbers, which are aligned right."""
        return [all(map(NUMBER.fullmatch, cells)) for cells in self.columns.values()]

    def markdown(self) -> str:
        """Its lines in Markdown without the title, as wide as its cells."""
        # A bar in a cell's text would end the cell.
        texts = [[text.replace("|", "\\|") for text in row] for row in self.rows]
        marks = ["---:" if is_number else "---" for is_number in self.are_numbers]
        lines = [" | ".join(self.columns), *(" | ".join(row) for row in texts)]
        return "\n".join([f"| {lines[0]} |", f"|{'|'.join(marks)}|", *(f"| {line} |" for line in lines[1:])])


Text = Callable[[Figures], str]


def case_table(title: str, cases: Sequence[Figures], columns: Mapping[str, str | Text]) -> Table:
    """A row for each case. A column is a field of the case, or a text of it; one without any text is left out."""
    found = {
        name: [str(case.get(own) or MISSING) if isinstance(own, str) else own(case) for case in cases]
        for name, own in columns.items()
    }
    return Table(title, {name: cells for name, cells in found.items() if any(cell != MISSING for cell in cells)})


# What tells a case from others.
KEY = ("group", "variant", "shape", "precision")


def table_of(
    title: str, columns: Mapping[str, str | Text], covers: Callable[[Figures], bool] = lambda case: True
) -> Callable[[dict[str, Any]], Table]:
    """Makes a table of results: a row for each case that it `covers`, with its key and these columns."""
    every = {**{name: name for name in KEY}, **columns}
    return lambda results: case_table(title, [case for case in results["cases"] if covers(case)], every)


def of(contender: str, name: str, text: Callable[[Any], str]) -> Text:
    """A figure of a contender."""
    return lambda case: figure(case["contenders"].get(contender), name, text)


def ratio_of(value: Callable[[Figures], float | None]) -> Text:
    """A ratio of times, or of errors."""
    return lambda case: ratio(value(case))


def times_of(labels: Mapping[str, str]) -> dict[str, str | Text]:
    """The microseconds of each contender, of the labels by their names."""
    return {f"{label} us": of(name, "median_us", microseconds) for name, label in labels.items()}


def show(tables: Iterable[Table], remarks: Sequence[str]) -> None:
    """Print tables and remarks: with rich, or as Markdown where it is not installed."""
    tables = [table for table in tables if table.rows]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print(markdown(tables, remarks))
        return
    console = Console()
    if not console.is_terminal:  # A pipe has no width of its own, and rich would fold the columns to 80.
        console = Console(width=PIPE_WIDTH)
    for table in tables:
        grid = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name, is_number in zip(table.columns, table.are_numbers, strict=True):
            grid.add_column(name, justify="right" if is_number else "left")
        for row in table.rows:
            styles = [next((style for word, style in STYLES.items() if text.startswith(word)), "") for text in row]
            grid.add_row(*map(Text, row, styles))
        console.print(grid)
    for line in remarks:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def markdown(tables: Iterable[Table], remarks: Sequence[str]) -> str:
    """The tables with their titles, and the remarks, in Markdown."""
    parts = [f"**{table.title}**\n\n{table.markdown()}\n" for table in tables if table.rows]
    return "\n".join([*parts, *(f"- {line}" for line in remarks)])
