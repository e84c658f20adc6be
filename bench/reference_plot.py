"""The reference suite's plot: every contender's time over the floor that the card's measured ceilings give."""

from __future__ import annotations

from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.contenders import CONTENDERS
from bench.format import duration
from bench.plot import CONTENDER_COLOURS, by_powers, horizontal
from bench.report import heading
from bench.suite import Figures, Results
from bench.workloads import PRECISIONS

ROW = 0.34  # inches of height for a case
COLUMNS = 2


def unit(case: Figures) -> float | None:
    """The time that a case's times are multiples of: the floor, or eager's."""
    floor: float | None = case.get("floor_us") or case["contenders"].get("eager", {}).get("median_us")
    return floor


def multiples(case: Figures) -> dict[str, float]:
    """The time of each contender over the unit."""
    base = unit(case)
    entries: dict[str, Any] = case["contenders"]
    return {name: entry["median_us"] / base for name, entry in entries.items() if base and "median_us" in entry}


def draw_precision(axes: Axes, cases: list[Figures], title: str) -> None:
    """A row of dots for each case, cutfuse's with its time."""
    for place, case in enumerate(cases):
        for name, value in multiples(case).items():
            axes.plot(value, place, "o", markersize=6, color=CONTENDER_COLOURS[name])
        if "cutfuse" in multiples(case):
            text = duration(case["contenders"]["cutfuse"]["median_us"])
            place_of_text = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "size": 7}
            axes.annotate(text, (multiples(case)["cutfuse"], place), **place_of_text)
    by_powers(axes.xaxis, [1.0, *(value for case in cases for value in multiples(case).values())])
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.9)
    horizontal(axes, [f"{case['group']}\n{case['shape']}" for case in cases], title)


def draw(results: Results) -> Figure | None:
    """The figure; None where nothing was measured."""
    measured = [case for case in results["cases"] if multiples(case)]
    panels = {name: [case for case in measured if case["precision"] == name] for name in PRECISIONS}
    panels = {name: cases for name, cases in panels.items() if cases}
    if not panels:
        return None
    rows = -(-len(panels) // COLUMNS)
    height = ROW * max(map(len, panels.values())) + 0.6
    figure = Figure(figsize=(11, rows * height + 0.9), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    over = "the floor" if measured[0].get("floor_us") else "eager"
    for axes, (name, cases) in zip(grid, panels.items(), strict=False):
        draw_precision(axes, cases, f"{name}: time / {over}, and cutfuse's time")
    for axes in grid[len(panels) :]:
        axes.remove()
    for name in results["settings"]["contenders"]:
        figure.axes[0].plot([], [], "o", color=CONTENDER_COLOURS[name], label=CONTENDERS[name].label)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(heading(results), size=9)
    return figure
