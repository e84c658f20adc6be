"""Tables of cells: as Markdown, and with rich as wide as the terminal allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 240


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, a second line where there is room for one, and a colour. ";" may break a line."""

    text: str
    detail: str = ""
    style: str = ""


Grid = tuple[list[str], list[list[Cell]]]  # the headings, and the rows


def grid_of(columns: Mapping[str, Sequence[Cell]], without: Sequence[str] = ()) -> Grid:
    """A table of columns by their headings, but for those named in `without`."""
    kept = {name: cells for name, cells in columns.items() if name not in without}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], left: Sequence[str]) -> list[str]:
    """A table's lines in Markdown; the columns named in `left` are text and aligned left."""
    return [
        f"| {' | '.join(headings)} |",
        "|" + "|".join("---" if name in left else "---:" for name in headings) + "|",
        # A bar in a cell's text would end the cell.
        *(f"| {' | '.join(cell.text.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


def rich_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], left: Sequence[str], grouped_by: int = 0
) -> Table:
    """A table for rich, with a line wherever one of the first `grouped_by` cells changes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in headings:
        grid.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    previous = None
    for row in rows:
        group = [cell.text for cell in row[:grouped_by]]
        if previous not in (None, group):
            grid.add_section()
        previous = group
        grid.add_row(*(Text(cell.text.replace("; ", "\n"), style=cell.style) for cell in row))
    return grid


def rich_console() -> Console | None:
    """A console, or None without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    # A pipe has no width of its own, and rich would fold the columns to 80.
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def print_fitting(console: Console, build: Callable[[tuple[str, ...]], Table], droppable: Sequence[str]) -> list[str]:
    """Print the table that `build` makes without the first of `droppable`, as few as have to go; names those, if any.

    `build` takes the headings of the columns to leave out.
    """
    unbounded = console.options.update(max_width=10_000)  # On its own width, a console measures only what fits.
    count = 0
    while count < len(droppable):
        if console.measure(build(tuple(droppable[:count])), options=unbounded).maximum <= console.width:
            break
        count += 1
    console.print(build(tuple(droppable[:count])))
    left_out = ", ".join(droppable[:count])
    return [f"Columns left out, because the terminal is too narrow: {left_out}."] if count else []


@dataclass(frozen=True)
class TitledTable:
    """A table of a suite's results: `build` makes it without some columns, and those in `left` are text."""

    title: str
    build: Callable[[dict[str, Any], tuple[str, ...]], Grid]
    left: Sequence[str]

    def markdown(self, results: dict[str, Any], without: tuple[str, ...] = ()) -> list[str]:
        """Its lines in Markdown; none where it has no rows."""
        headings, rows = self.build(results, without)
        return [f"**{self.title}**", "", *markdown_table(headings, rows, self.left), ""] if rows else []

    def print(self, results: dict[str, Any], console: Console, droppable: Sequence[str]) -> list[str]:
        """Print it as wide as the terminal allows, if it has rows; names the columns that had to go."""
        headings, rows = self.build(results, ())
        if not rows:
            return []

        def fitting(without: tuple[str, ...]) -> Table:
            return rich_table(self.title, *self.build(results, without), self.left, grouped_by=1)

        return print_fitting(console, fitting, [name for name in droppable if name in headings])


def markdown_of(
    tables: Sequence[TitledTable], results: dict[str, Any], remarks: Sequence[str], without: tuple[str, ...] = ()
) -> str:
    """Every table without the columns of the headings in `without`, and the remarks."""
    lines = [line for table in tables for line in table.markdown(results, without)]
    return "\n".join([*lines, *(f"- {line}" for line in remarks)])


def print_tables(
    console: Console,
    tables: Sequence[TitledTable],
    results: dict[str, Any],
    remarks: Sequence[str],
    droppable: Sequence[str],
) -> None:
    """Print the tables, the remarks, and which columns had to go."""
    dropped = [name for table in tables for name in table.print(results, console, droppable)]
    print_lines(console, [*remarks, *dict.fromkeys(dropped)])


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Print remarks as they are."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
