"""Tables of text: as Markdown, and with rich as wide as the terminal allows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.format import MISSING, figure, microseconds

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


def filled(columns: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The columns in which a cell is not empty."""
    return {name: cells for name, cells in columns.items() if any(cell != MISSING for cell in cells)}


def times_columns(cases: Sequence[Figures], labels: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """The microseconds of each contender, of the labels by their names."""
    return {
        f"{label} us": [figure(case["contenders"].get(name), "median_us", microseconds) for case in cases]
        for name, label in labels.items()
    }


def style_of(text: str) -> str:
    """The colour of a verdict or a failure."""
    return next((style for word, style in STYLES.items() if text.startswith(word)), "")


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
            grid.add_row(*(Text(text, style=style_of(text)) for text in row))
        console.print(grid)
    for line in remarks:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def markdown(tables: Iterable[Table], remarks: Sequence[str]) -> str:
    """The tables with their titles, and the remarks, in Markdown."""
    parts = [f"**{table.title}**\n\n{table.markdown()}\n" for table in tables if table.rows]
    return "\n".join([*parts, *(f"- {line}" for line in remarks)])
