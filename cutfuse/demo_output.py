"""How the demo looks: progress, a table with bars, what to try next. Where rich is installed, it colours a terminal."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from .printing import bar_characters

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 20
BAR_HEADING = "time against PyTorch's\n(full bar: PyTorch)"
HEADINGS = (
    *("model", "input", "precision", "path", "error:\nPyTorch", "error:\ncutfuse"),
    *("time:\nPyTorch", "time:\ncutfuse", "ratio", BAR_HEADING, "check"),
)
TIME_HEADINGS = ("time:\nPyTorch", "time:\ncutfuse", "ratio", BAR_HEADING)
TEXT_HEADINGS = ("model", "input", "precision", "path", BAR_HEADING, "check")
# What a narrow terminal goes without, in this order.
DROPPABLE = (
    ("input",),
    ("path",),
    ("error:\nPyTorch", "error:\ncutfuse"),
    ("time:\nPyTorch", "time:\ncutfuse"),
    (BAR_HEADING,),
)
GAP = 2  # between two columns
PIPE_WIDTH = 100  # where neither a terminal nor COLUMNS says how wide the output is
OK, MISMATCH = "ok", "MISMATCH"


class Figures(NamedTuple):
    """What a row of the table shows: errors and seconds are PyTorch's, then cutfuse's; seconds may be None."""

    model: str
    shape: tuple[int, ...]
    precision: str
    path: str
    errors: tuple[float, float]
    seconds: tuple[float, float] | None
    matches: bool

    @property
    def ratio(self) -> float:
        """NaN without times."""
        return self.seconds[1] / self.seconds[0] if self.seconds else math.nan


class Stage(Protocol):
    """Says which case runs now."""

    def __call__(self, text: str) -> None: ...


def bar(ratio: float, characters: str) -> str:
    """cutfuse's time as a part of PyTorch's, in BAR_WIDTH characters; a ">" behind it where it is longer.

    `characters`: for what is filled, and for the rest.
    """
    filled = min(BAR_WIDTH, max(1, round(BAR_WIDTH * ratio)))
    return characters[0] * filled + characters[1] * (BAR_WIDTH - filled) + (">" if ratio > 1.025 else "")


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def cells(figures: Figures, characters: str) -> dict[str, str]:
    """The texts of a row by the headings of their columns."""
    texts = (
        figures.model,
        "x".join(map(str, figures.shape)),
        figures.precision,
        figures.path,
        *(f"{error:.1e}" for error in figures.errors),
        OK if figures.matches else MISMATCH,
    )
    found = dict(zip([heading for heading in HEADINGS if heading not in TIME_HEADINGS], texts, strict=True))
    if figures.seconds:
        times = (*map(format_seconds, figures.seconds), f"{figures.ratio:.2f}", bar(figures.ratio, characters))
        found.update(zip(TIME_HEADINGS, times, strict=True))
    return found


class Layout(NamedTuple):
    """The table's rows, and the widths of the columns that are shown by their headings."""

    rows: list[dict[str, str]]
    widths: dict[str, int]
    dropped: tuple[str, ...]

    @property
    def remark(self) -> str:
        """Names the columns that the width left no room for; empty if there are none."""
        names = ["bars" if heading == BAR_HEADING else heading.replace("\n", " ") for heading in self.dropped]
        return f"Columns left out, because the terminal is too narrow: {', '.join(names)}." if names else ""


def arrange(results: Sequence[Figures], characters: str, width: int) -> Layout:
    """The table without the first of DROPPABLE, as few as have to go for it to be at most `width` wide."""
    rows = [cells(figures, characters) for figures in results]
    widths = {
        heading: max(map(len, [*heading.split("\n"), *(row[heading] for row in rows)]))
        for heading in HEADINGS
        if all(heading in row for row in rows)
    }
    dropped: list[str] = []
    for group in DROPPABLE:
        if sum(widths.values()) + GAP * (len(widths) - 1) <= width:
            break
        dropped += [heading for heading in group if widths.pop(heading, None) is not None]
    return Layout(rows, widths, tuple(dropped))


def format_table(layout: Layout) -> str:
    """The results as aligned columns: text to the left, numbers to the right."""

    def format_row(row: dict[str, str]) -> str:
        aligned = (
            row[heading].ljust(width) if heading in TEXT_HEADINGS else row[heading].rjust(width)
            for heading, width in layout.widths.items()
        )
        return (GAP * " ").join(aligned).rstrip()

    first, second = ({heading: heading.rpartition("\n")[part] for heading in HEADINGS} for part in (0, 2))
    rule = (GAP * " ").join("-" * width for width in layout.widths.values())
    return "\n".join([format_row(first), format_row(second), rule, *map(format_row, layout.rows)])


def terminal_console() -> Console | None:
    """rich's console, or None where rich or a terminal is missing."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()


def show_table(results: Sequence[Figures]) -> None:
    """Prints the table as wide as the output is, and what its columns are."""
    characters = bar_characters(sys.stdout.encoding)
    console = terminal_console()
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns if console is None else console.width
    layout = arrange(results, characters, width)
    if console is None:
        print(format_table(layout))
    else:
        show_rich(results, layout, console)
    remarks = [
        "ratio: time of cutfuse over PyTorch, below 1 is faster." if "ratio" in layout.widths else "",
        "Errors are relative to fp64." if "error:\ncutfuse" in layout.widths else "",
        layout.remark,
    ]
    print(textwrap.fill(" ".join(filter(None, remarks)), width))


def show_rich(results: Sequence[Figures], layout: Layout, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # One space of padding and one of the box are the gap.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold")
    for heading, width in layout.widths.items():
        justify: Literal["left", "right"] = "left" if heading in TEXT_HEADINGS else "right"
        table.add_column(heading, justify=justify, no_wrap=True, min_width=width)
    for figures, row in zip(results, layout.rows, strict=True):
        faster = "green" if figures.ratio < 0.98 else ""
        styles = {"ratio": faster, BAR_HEADING: faster, "check": "" if figures.matches else "bold red"}
        table.add_row(*(Text(row[heading], style=styles.get(heading, "")) for heading in layout.widths))
    console.print(table)


@contextmanager
def progress(total: int) -> Iterator[Stage]:
    """Gives a function that is told of each case when it starts: a bar on a terminal with rich, lines elsewhere."""
    console = terminal_console()
    if console is None:
        started = iter(range(1, total + 1))
        yield lambda text: print(f"[{next(started)}/{total}] {text}", file=sys.stderr, flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(BAR_WIDTH), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=total)
        # rich counts a case when the next one starts: -1, so that the first one is not done yet.
        shown.update(task, completed=-1)
        yield lambda text: shown.update(task, description=text, advance=1)


def next_steps(has_kernels: bool) -> str:
    """What to go on with, most useful first, at most 80 columns wide."""
    steps = [
        ("python -m cutfuse.epilogue", "the functions that an epilogue may use"),
        ("python -m cutfuse.report", "build and settings, for a bug report"),
    ]
    if has_kernels:
        steps.insert(0, ("python -m bench reference --quick", "in a clone: beside torch.compile"))
    width = max(len(command) for command, _ in steps)
    lines = [
        "Try next an epilogue of your own, and ask which kernels run, and why:",
        "  y = cutfuse.linear(x, weight, bias, epilogue=lambda z: z * torch.sigmoid(z))",
        "  print(cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid, reduce='sum'))",
        *(f"  {command.ljust(width)}   # {purpose}" for command, purpose in steps),
    ]
    return "\n".join(lines)
