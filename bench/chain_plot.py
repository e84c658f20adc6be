"""The chains suite's plot: the lines beside their limits, products from small to large, and shares of the ceilings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from bench import line_plot
from bench.chain_cases import LINEAR, gflop
from bench.chain_contenders import INTERPRETED, MM, SPECIALIZED
from bench.chain_report import fastest_compiled, quotient
from bench.chain_suite import GOALS, RATIO, SHARE, median, sizes_of
from bench.plot import CONTENDER_COLOURS, GRID, save_png
from bench.report import heading

PRECISION_COLOURS = {
    "bf16": CONTENDER_COLOURS["cutfuse"],
    "fp16": "#a17fc0",
    "tf32": CONTENDER_COLOURS["compile"],
    "fp32": "#6a9f58",
}
LINE_HEIGHT, SCATTER_HEIGHT = 0.26, 4.4  # inches
# Products of one shape lie side by side, by precision: factors of their place on the axis.
PLACES = {name: 1.09 ** (place - 1.5) for place, name in enumerate(PRECISION_COLOURS)}
TICKS = (5, 10, 20, 50, 100, 200, 500)
TIME_TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20)
SUBJECTS = {
    "the best of torch.compile": fastest_compiled,
    "torch.mm alone": lambda case: median(case, MM),
}
Point = tuple[float, float]


def label_of(line: dict[str, Any]) -> str:
    """A line as its bar is labelled."""
    over = f" / {line['against']}" if line["unit"] == RATIO else ""
    return f"{line['line']}  {line['what']}{over}, {line['measure']}"


def lines_of(results: dict[str, Any], unit: str) -> list[tuple[dict[str, Any], list[float]]]:
    """The measured lines of a unit as bars, each with the values of its cases."""
    found = []
    for line, goal in zip(results["lines"], GOALS, strict=True):
        if line["unit"] != unit or line["value"] is None:
            continue
        cells = [value for case in results["cases"] if goal.covers(case) and (value := goal.value(case)) is not None]
        found.append(({**line, "ratio": line["value"], "at_most": line["limit"]}, cells))
    return found


def draw_lines(axes: Axes, results: dict[str, Any], unit: str) -> None:
    """A bar for each line of a unit, a dot for each of its cases, and a mark at its limit."""
    lines, cells = zip(*lines_of(results, unit), strict=True)
    what = "the specialized kernel's time / another: at most the mark"
    title = what if unit == RATIO else "share of the memory's ceiling: at least the mark"
    line_plot.draw_lines(axes, lines, list(map(label_of, lines)), cells, title)


def points_of(cases: list[dict[str, Any]], name: str, base: Any) -> dict[str, list[Point]]:
    """By precision, the products' size and a contender's time over another's."""
    found: dict[str, list[Point]] = {}
    for case in cases:
        value = quotient(case, name, base(case))
        if value is not None:
            size = gflop(sizes_of(case)) * PLACES[case["precision"]]
            found.setdefault(case["precision"], []).append((size, value))
    return found


def scale(axes: Axes, points: list[Point]) -> None:
    """Both axes by powers, so that twice as fast is as far from 1 as half as fast."""
    sizes, values = zip(*points, strict=True)
    axes.set(xscale="log", yscale="log")
    for axis, ticks, own in ((axes.xaxis, TICKS, sizes), (axes.yaxis, TIME_TICKS, (1.0, *values))):
        axis.set_ticks([tick for tick in ticks if min(own) / 1.2 <= tick <= max(own) * 1.2])
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set(xlim=(min(sizes) / 1.2, max(sizes) * 1.2), ylim=(min(1.0, *values) / 1.1, max(1.0, *values) * 1.1))


def draw_products(axes: Axes, cases: list[dict[str, Any]], subject: str) -> bool:
    """A filled point for each specialized kernel, and a ring for the same interpreted; False where there is none."""
    styles: dict[str, dict[str, Any]] = {
        INTERPRETED: {"facecolors": "none", "linewidths": 0.8},
        SPECIALIZED: {"linewidths": 0.0},
    }
    drawn = []
    for name, style in styles.items():
        for precision, points in points_of(cases, name, SUBJECTS[subject]).items():
            colour = PRECISION_COLOURS[precision]
            own = {"color": colour, **style} if name == SPECIALIZED else {"edgecolors": colour, **style}
            axes.scatter(*zip(*points, strict=True), s=16, **own)
            drawn += points
    if not drawn:
        return False
    scale(axes, drawn)
    axes.axhline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.set_xlabel("GFLOP of the product", size=8)
    axes.set_title(f"time / {subject}", size=8, loc="left", weight="bold")
    axes.tick_params(labelsize=7)
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return True


def draw_legend(figure: SubFigure) -> None:
    """Colours are precisions; filled is specialized."""
    handles = [
        Line2D([], [], color=colour, marker="o", linestyle="", markersize=4, label=name)
        for name, colour in PRECISION_COLOURS.items()
    ]
    for label, fill in (("specialized", "full"), ("interpreted", "none")):
        handles.append(
            Line2D([], [], color="#8c8c8c", marker="o", linestyle="", markersize=4, fillstyle=fill, label=label)
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=7)


def draw(results: dict[str, Any]) -> Figure | None:
    """The figure; None where nothing was measured."""
    units = [unit for unit in (RATIO, SHARE) if lines_of(results, unit)]
    products = [case for case in results["cases"] if case["group"] == LINEAR]
    has_points = any(
        points_of(products, name, base) for name in (INTERPRETED, SPECIALIZED) for base in SUBJECTS.values()
    )
    if not units and not has_points:
        return None
    heights = [LINE_HEIGHT * len(lines_of(results, unit)) + 0.6 for unit in units]
    heights += [len(SUBJECTS) * SCATTER_HEIGHT] * has_points
    figure = Figure(figsize=(8.5, sum(heights) + 0.3), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).ravel()
    for part, unit in zip(parts, units, strict=False):
        draw_lines(part.subplots(), results, unit)
    if has_points:
        panels = parts[-1].subplots(len(SUBJECTS), 1)
        for axes, subject in zip(panels, SUBJECTS, strict=True):
            if not draw_products(axes, products, subject):
                axes.remove()
        draw_legend(parts[-1])
    figure.suptitle(heading(results), size=7)
    return figure


def write_png(results: dict[str, Any], path: Path) -> bool:
    """Draw `results` into `path`; False where nothing was measured."""
    return save_png(draw(results), path)
