"""The host suite's plot: its goals beside their limits, and fp32 calls from small to large."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.goals import median
from bench.host_run import PYTORCH
from bench.host_suite import DRAWN_BARE, DRAWN_GELU, over_pytorch
from bench.plot import CONTENDER_COLOURS, figure_of, finish, goal_panels, scatter
from bench.suite import Results

DRAWN_COLOURS = {DRAWN_GELU.name: CONTENDER_COLOURS["cutfuse"], DRAWN_BARE.name: CONTENDER_COLOURS["compile"]}
SCATTER_HEIGHT = 3.0  # inches


def drawn_points(results: Results) -> dict[str, list[tuple[float, float]]]:
    """Of the fp32 calls of each kind: PyTorch's time, and the ratio."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in results["cases"]:
        value, time = over_pytorch(case), median(case, PYTORCH)
        if case["group"] in DRAWN_COLOURS and value is not None and time is not None:
            found.setdefault(case["group"], []).append((time, value))
    return found


def draw_drawn(axes: Axes, found: dict[str, list[tuple[float, float]]]) -> None:
    """A point for each fp32 call, by PyTorch's time."""
    scatter(axes, found, DRAWN_COLOURS, 14, 1.15)
    axes.set_ylim(0, 1.1 * max(1.0, *(value for own in found.values() for _, value in own)))
    axes.set_xlabel("PyTorch's whole time in µs", size=8)
    axes.set_ylabel("cutfuse / PyTorch", size=8)
    finish(axes, "fp32 with M, N and K drawn at random")


def draw(results: Results) -> Figure | None:
    """The figure; None where nothing was measured."""
    panels = goal_panels(results)
    found = drawn_points(results)
    if found:
        panels.append((SCATTER_HEIGHT, partial(draw_drawn, found=found)))
    return figure_of(results, panels, 8.5)
