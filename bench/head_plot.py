"""The head suite's plot: time and memory of a training step against tokens, beside its goals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.goals import figure_of as value_of
from bench.head_suite import CONTENDERS, HEADS, TRAINING
from bench.plot import Panel, Points, by_powers, figure_of, finish, goal_panels
from bench.suite import Results

HEIGHT = 2.6  # inches
MEASURES = (("median_us", 1e3, "ms"), ("peak_bytes", 1e9, "GB"))


def points(results: Results, head: str, name: str, unit: float) -> dict[str, Points]:
    """A figure of each contender's training steps of a head, by tokens."""
    cases = [case for case in results["cases"] if (case["group"], case["variant"]) == (head, TRAINING)]
    found: dict[str, Points] = {}
    for contender, own in CONTENDERS.items():
        values = [(case["tokens"], value_of(case, contender, name)) for case in cases]
        measured = sorted((tokens, value / unit) for tokens, value in values if value)
        if measured:
            found[own.label] = measured
    return found


def draw_points(axes: Axes, found: dict[str, Points], title: str, unit: str) -> None:
    """A line for each contender."""
    for label, own in found.items():
        style = "-" if "cutfuse" in label else "--"
        axes.plot(*zip(*own, strict=True), style, marker=".", label=label, linewidth=1.2)
    by_powers(axes.yaxis, [y for own in found.values() for _, y in own])
    tokens = sorted({x for own in found.values() for x, _ in own})
    axes.set_xscale("log")
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens", size=8)
    axes.set_ylabel(unit, size=8)
    axes.legend(frameon=False, fontsize=6)
    finish(axes, title)


def draw(results: Results) -> Figure | None:
    """The figure; None where nothing was measured."""
    panels: list[Panel] = goal_panels(results)
    for head in HEADS:
        for name, scale, unit in MEASURES:
            found = points(results, head.name, name, scale)
            if found:
                own: Callable[[Axes], None] = partial(
                    draw_points, found=found, title=f"{head.name}: a training step", unit=unit
                )
                panels.append((HEIGHT, own))
    return figure_of(results, panels, 8.5)
