"""The models suite's plot: every line's ratio beside its target, and each model's times over PyTorch's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import line_plot
from bench.model_cases import FULL_BATCH, PRECISIONS, SMALL_BATCH
from bench.model_contenders import CONTENDERS, CUTFUSE, CUTFUSE_GRAPHS, FASTER
from bench.model_report import rival_label
from bench.model_suite import FIGURES, GPU, WALL, covers, ratio_of, verdict_of
from bench.model_zoo import FORWARD, TRAINING
from bench.plot import CONTENDER_COLOURS, GRID, save_png
from bench.report import heading

COLOURS = {
    "eager": "#8c8c8c",
    "compile": CONTENDER_COLOURS["compile"],
    "compile-graphs": CONTENDER_COLOURS["max-autotune"],
    "cutfuse": CONTENDER_COLOURS["cutfuse"],
    "cutfuse-graphs": "#b5502a",
}
SHOWN = tuple(COLOURS)
PANELS = ((FORWARD, SMALL_BATCH), (FORWARD, FULL_BATCH), (TRAINING, FULL_BATCH))
LINE_HEIGHT, MODEL_HEIGHT = 0.26, 0.24  # inches


def label_of(line: dict[str, Any]) -> str:
    """A line as its bar is labelled."""
    load = f"{line['load']} batch" if line["load"] else ""
    graphs = "CUDA graphs" if line["own"] == CUTFUSE_GRAPHS.name else ""
    parts = [line["kind"], line["precision"], load, graphs, FIGURES[line["figure"]], line["measure"]]
    return f"{line['line']}  {', '.join(part for part in parts if part)}"


def ratios_of(results: dict[str, Any], line: dict[str, Any]) -> list[float]:
    """The ratios of a line's cases."""
    values = [ratio_of(line, case) for case in results["cases"] if covers(line, case)]
    return [value for value in values if value is not None and math.isfinite(value)]


def quotient(case: dict[str, Any], name: str, figure: str) -> float | None:
    """A contender's time over that of the faster of eager and torch.compile."""
    return ratio_of({"own": name, "rival": FASTER, "figure": figure}, case)


def draw_times(axes: Axes, cases: list[dict[str, Any]], title: str) -> None:
    """Each case's contenders over PyTorch's faster one: a dot for the GPU's time, and a ring for the wall clock's."""
    for place, case in enumerate(cases):
        for name in SHOWN:
            for figure, fill in ((GPU, COLOURS[name]), (WALL, "none")):
                value = quotient(case, name, figure)
                if value is not None:
                    axes.plot(value, place, "o", markersize=5, markeredgecolor=COLOURS[name], markerfacecolor=fill)
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.set_yticks(range(len(cases)), [f"{case['group']}, {case['shape']}" for case in cases], size=6)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(title, size=8, loc="left", weight="bold")
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def panels_of(results: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The titles and cases of the panels that have any, a pass and a batch after another, bf16 before fp32."""
    found = []
    for kind, load in PANELS:
        for precision in PRECISIONS:
            own = [
                case
                for case in results["cases"]
                if (case["variant"], case["load"], case["precision"]) == (kind, load, precision)
                and quotient(case, CUTFUSE.name, GPU) is not None
            ]
            if own:
                found.append((f"{kind}, {precision}, {load} batch", own))
    return found


def draw(results: dict[str, Any]) -> Figure | None:
    """The figure; None where nothing was measured."""
    lines = [line for line in results["lines"] if line["ratio"] is not None and math.isfinite(line["ratio"])]
    if not lines:
        return None
    panels = panels_of(results)
    heights = [LINE_HEIGHT * len(lines) + 0.6]
    heights += [MODEL_HEIGHT * len(cases) + 0.6 for _, cases in panels]
    figure = Figure(figsize=(8.5, sum(heights) + 0.8), layout="constrained")
    grid = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).ravel()
    title = "cutfuse / the other: the mark is the target, dots are models"
    cells = [ratios_of(results, line) for line in lines]
    shown = [{**line, "verdict": verdict_of(line)} for line in lines]
    line_plot.draw_lines(grid[0], shown, list(map(label_of, lines)), cells, title)
    for axes, (name, cases) in zip(grid[1:], panels, strict=True):
        draw_times(axes, cases, name)
    for name in SHOWN:
        figure.axes[-1].plot([], [], "o", color=COLOURS[name], label=CONTENDERS[name].label)
    figure.legend(loc="outside lower center", ncols=len(SHOWN), frameon=False, fontsize=7)
    figure.suptitle(
        f"{heading(results)}\nBelow: time / {rival_label(FASTER)}; filled: GPU time; rings: wall time", size=7
    )
    return figure


def write_png(results: dict[str, Any], path: Path) -> bool:
    """Draw `results` into `path`; False where nothing was measured."""
    return save_png(draw(results), path)
