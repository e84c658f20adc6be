"""The host suite's plot: every line's ratio beside its target, each shape's, and fp32 calls from small to large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench import line_plot
from bench.host_cases import DRAWN_BARE, DRAWN_GELU
from bench.host_suite import MEAN, PYTORCH, covers
from bench.host_suite import ratio as ratio_of
from bench.plot import CONTENDER_COLOURS, GRID, save_png
from bench.report import heading

DRAWN_COLOURS = {DRAWN_GELU.name: CONTENDER_COLOURS["cutfuse"], DRAWN_BARE.name: CONTENDER_COLOURS["compile"]}
LINE_HEIGHT, SCATTER_HEIGHT = 0.26, 3.0  # inches
TICKS_US = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


def label_of(line: dict[str, Any]) -> str:
    """A line as its bar is labelled."""
    parts = [line["group"], line["shape"], line["precision"], line["measure"] if line["measure"] == MEAN else ""]
    return f"{line['line']}  {', '.join(part for part in parts if part)} ({line['time']})"


def ratios_of(results: dict[str, Any], line: dict[str, Any]) -> list[float]:
    """The ratios of a line's cases."""
    values = [ratio_of(case) for case in results["cases"] if covers(line, case)]
    return [value for value in values if value is not None]


def draw_lines(axes: Axes, results: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """A bar for each line, a dot for each of its shapes, and a mark at its target."""
    title = "cutfuse's time / PyTorch's: the mark is the target, dots are shapes"
    line_plot.draw_lines(axes, lines, list(map(label_of, lines)), [ratios_of(results, line) for line in lines], title)


def drawn_points(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Of the fp32 calls of each kind: PyTorch's time, and the ratio."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in results["cases"]:
        value = ratio_of(case)
        if case["group"] in DRAWN_COLOURS and value is not None:
            found.setdefault(case["group"], []).append((case["contenders"][PYTORCH]["median_us"], value))
    return found


def draw_drawn(axes: Axes, found: dict[str, list[tuple[float, float]]]) -> None:
    """A point for each fp32 call, by PyTorch's time."""
    for name, points in found.items():
        axes.scatter(*zip(*points, strict=True), s=14, color=DRAWN_COLOURS[name], label=name)
    times, values = zip(*(point for own in found.values() for point in own), strict=True)
    left, right = min(times) / 1.15, max(times) * 1.15
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    axes.set_xticks([tick for tick in TICKS_US if left <= tick <= right])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1.1 * max(1.0, *values))
    axes.axhline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.set_xlabel("PyTorch's whole time in µs", size=8)
    axes.set_ylabel("cutfuse / PyTorch", size=8)
    axes.set_title("fp32 with M, N and K drawn at random", size=8, loc="left", weight="bold")
    axes.tick_params(labelsize=7)
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)


def draw(results: dict[str, Any]) -> Figure | None:
    """The figure; None where nothing was measured."""
    lines = [line for line in results["lines"] if line["ratio"] is not None]
    if not lines:
        return None
    found = drawn_points(results)
    heights = [LINE_HEIGHT * len(lines) + 0.5, *([SCATTER_HEIGHT] if found else [])]
    figure = Figure(figsize=(8.5, sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).ravel()
    draw_lines(panels[0], results, lines)
    if found:
        draw_drawn(panels[1], found)
    figure.suptitle(heading(results), size=7)
    return figure


def write_png(results: dict[str, Any], path: Path) -> bool:
    """Draw `results` into `path`; False where nothing was measured."""
    return save_png(draw(results), path)
