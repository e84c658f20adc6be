"""The models suite's plot: its goals beside their limits, and each model's times over PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.model_contenders import CONTENDERS, CUTFUSE, FASTER
from bench.model_suite import FULL_BATCH, GPU, PRECISIONS, SMALL_BATCH, WALL, over
from bench.model_zoo import FORWARD, TRAINING
from bench.plot import CONTENDER_COLOURS, Panel, figure_of, goal_panels, horizontal
from bench.suite import Figures, Results

COLOURS = {
    "eager": "#8c8c8c",
    "compile": CONTENDER_COLOURS["compile"],
    "compile-graphs": CONTENDER_COLOURS["max-autotune"],
    "cutfuse": CONTENDER_COLOURS["cutfuse"],
    "cutfuse-graphs": "#b5502a",
}
SHOWN = tuple(COLOURS)
PASSES = ((FORWARD, SMALL_BATCH), (FORWARD, FULL_BATCH), (TRAINING, FULL_BATCH))
MODEL_HEIGHT = 0.24  # inches


def draw_times(axes: Axes, cases: Sequence[Figures], title: str) -> None:
    """Each case's contenders over PyTorch's faster one: a dot for the GPU's time, and a ring for the wall clock's."""
    for place, case in enumerate(cases):
        for name in SHOWN:
            for figure, fill in ((GPU, COLOURS[name]), (WALL, "none")):
                value = over(CONTENDERS[name], FASTER, figure, case)
                if value is not None:
                    axes.plot(value, place, "o", markersize=5, markeredgecolor=COLOURS[name], markerfacecolor=fill)
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    for name in SHOWN:
        axes.plot([], [], "o", color=COLOURS[name], label=CONTENDERS[name].label)
    axes.legend(frameon=False, fontsize=6)
    horizontal(axes, [f"{case['group']}, {case['shape']}" for case in cases], title)


def time_panels(results: Results) -> list[Panel]:
    """A panel for each pass, batch and precision of which something was measured."""
    panels: list[Panel] = []
    for kind, load in PASSES:
        for precision in PRECISIONS:
            key = (kind, load, precision)
            own = [
                case
                for case in results["cases"]
                if (case["variant"], case["load"], case["precision"]) == key
                and over(CUTFUSE, FASTER, GPU, case) is not None
            ]
            title = f"{kind}, {precision}, {load} batch: time / faster of both; filled: GPU, rings: wall"
            if own:
                panels.append((MODEL_HEIGHT * len(own) + 0.6, partial(draw_times, cases=own, title=title)))
    return panels


def draw(results: Results) -> Figure | None:
    """The figure; None where nothing was measured."""
    return figure_of(results, [*goal_panels(results), *time_panels(results)], 8.5)
