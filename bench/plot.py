"""What the plots share: colours, the panel of a suite's goals, axes by powers, and a figure of panels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench.goals import Line, lines_of
from bench.report import heading, value_text
from bench.suite import Results

GRID: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.7}  # of the colour that the figure's theme gives it
CONTENDER_COLOURS = {
    "mm": "#b8b8b8",
    "eager": "#8fb3d9",
    "compile": "#4f81bd",
    "max-autotune": "#2f4f7f",
    "cutfuse": "#e8743b",
}
LINE_HEIGHT = 0.26  # inches
TICKS = tuple(step * 10.0**power for power in range(-3, 7) for step in (1, 2, 5))

Points = Sequence[tuple[float, float]]
# A panel's height in inches, and what draws it.
Panel = tuple[float, Callable[[Axes], None]]


def finish(axes: Axes, title: str, grid: str = "both", open_sides: Sequence[str] = ("top", "right")) -> None:
    """A panel's title, grid and frame."""
    axes.set_title(title, size=8, loc="left", weight="bold")
    axes.grid(axis=grid, **GRID)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7)
    axes.spines[list(open_sides)].set_visible(False)


def by_powers(axis: Axis, values: Sequence[float], margin: float = 1.2) -> None:
    """An axis on which twice as much is as far as half as much."""
    low, high = min(values) / margin, max(values) * margin
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_ticks([tick for tick in TICKS if low <= tick <= high])
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def horizontal(axes: Axes, labels: Sequence[str], title: str) -> None:
    """Rows from the top down, with a label each."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    finish(axes, title, "x", ("top", "right", "left"))
    axes.tick_params(axis="y", length=0)


def scatter(axes: Axes, points: Mapping[str, Points], colours: Mapping[str, str], size: float, margin: float) -> None:
    """A dot for each of the points by their names, x by powers, and a line where y is 1."""
    for name, own in points.items():
        axes.scatter(*zip(*own, strict=True), s=size, color=colours[name], label=name)
    by_powers(axes.xaxis, [x for own in points.values() for x, _ in own], margin)
    axes.axhline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.legend(frameon=False, fontsize=7)


def draw_lines(axes: Axes, lines: Sequence[Line], title: str) -> None:
    """A bar for each line, a dot for each of its cases, and a mark at its limit."""
    longest = 1.0
    for place, line in enumerate(lines):
        value, cells = line.value or 0.0, [value for value, _ in line.cells]
        axes.barh(place, value, height=0.7, color=CONTENDER_COLOURS["cutfuse"])
        axes.plot(cells, [place] * len(cells), ".", color=CONTENDER_COLOURS["max-autotune"], markersize=3)
        ends = [value, *cells]
        if line.goal.limit is not None:
            axes.plot([line.goal.limit] * 2, [place - 0.42, place + 0.42], color=rcParams["text.color"], linewidth=1.6)
            ends.append(line.goal.limit)
        text = ", ".join(filter(None, [value_text(line.goal, value), line.verdict]))
        axes.annotate(text, (max(ends), place), xytext=(4, 0), textcoords="offset points", va="center", size=7)
        longest = max(longest, *ends)
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.set_xlim(0, 1.25 * longest)
    horizontal(axes, [f"{line.goal.what}, {line.goal.measure}" for line in lines], title)


def lines_panel(lines: Sequence[Line], title: str) -> Panel:
    """A panel of lines."""
    return LINE_HEIGHT * len(lines) + 0.5, lambda axes: draw_lines(axes, lines, title)


def goal_panels(results: Results) -> list[Panel]:
    """A panel for each kind of goals of which something was measured: those with an upper limit, and the others."""
    titles = {False: "at most the mark: dots are cases", True: "at least the mark: dots are cases"}
    measured = [line for line in lines_of(results) if line.value not in (None, float("inf")) and not line.goal.unit]
    kinds = {title: [line for line in measured if line.goal.is_least == least] for least, title in titles.items()}
    return [lines_panel(own, title) for title, own in kinds.items() if own]


def figure_of(results: Results, panels: Sequence[Panel], width: float) -> Figure | None:
    """Panels below each other under what was run where; None where there is no panel."""
    if not panels:
        return None
    heights = [height for height, _ in panels]
    figure = Figure(figsize=(width, sum(heights) + 0.5), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).ravel()
    for axes, (_, draw) in zip(grid, panels, strict=True):
        draw(axes)
    figure.suptitle(heading(results), size=7)
    return figure
