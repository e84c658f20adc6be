"""The fp32 suite's plot: the lines' speed-ups beside their targets, and a heat map of every grid."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.fp32_report import GRIDS, WEIGHTS, cells_of, grid_title, times
from bench.plot import CONTENDER_COLOURS, GRID, save_png
from bench.report import heading

# As fast as cuBLAS is white. The ends are fixed, and twice as far as any target, so that plots of two runs compare.
COLOURS = LinearSegmentedColormap.from_list(
    "speed-up", [CONTENDER_COLOURS["compile"], "#ffffff", CONTENDER_COLOURS["cutfuse"]]
)
SCALE = LogNorm(1 / 8, 8, clip=True)
CELL_WIDTH, CELL_HEIGHT = 0.62, 0.34  # inches
HATCHED = "hatched: cutfuse ran cuBLAS itself"

Cells = dict[tuple[int, str], tuple[float, bool]]


def label_of(line: dict[str, Any]) -> str:
    """A line as its bar is labelled."""
    measure = f", {line['measure']}" if line["measure"] else ""
    return f"{line['line']}  {line['group']}{measure}, {WEIGHTS[line['contender']]}"


def draw_lines(axes: Axes, lines: list[dict[str, Any]]) -> None:
    """A bar for each line that was measured, and a mark at its target."""
    for index, line in enumerate(lines):
        value = line["speed_up"]
        axes.barh(index, value, height=0.7, color=CONTENDER_COLOURS["cutfuse"])
        axes.plot([line["at_least"]] * 2, [index - 0.42, index + 0.42], color=rcParams["text.color"], linewidth=1.6)
        reach = max(value, line["at_least"])
        text = f"{times(value)}, {line['verdict']}" if line["verdict"] else times(value)
        axes.annotate(text, (reach, index), xytext=(4, 0), textcoords="offset points", va="center", size=7)
    axes.set_yticks(range(len(lines)), [label_of(line) for line in lines], size=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(max(line["speed_up"], line["at_least"]) for line in lines))
    axes.set_title("times as fast as the fastest PyTorch; the mark is the target", size=8, loc="left", weight="bold")
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_grid(axes: Axes, found: Cells) -> None:
    """A coloured cell with its speed-up for each shape, hatched where cutfuse ran cuBLAS itself."""
    rows, columns = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    for (m, rest), (value, ran_cublas) in found.items():
        x, y = columns.index(rest), rows.index(m)
        hatch = "////" if ran_cublas else None
        axes.add_patch(
            Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=COLOURS(SCALE(value)), edgecolor="#d0d0d0", hatch=hatch)
        )
        # The hatch must not run through the figure.
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if ran_cublas else None
        axes.annotate(times(value), (x, y), ha="center", va="center", size=7, color="black", bbox=behind)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [str(rest).replace("x", "\nx") for rest in columns], size=7)
    axes.set_yticks(range(len(rows)), [str(m) for m in rows], size=7)
    axes.set_xlabel("N x K", size=8)
    axes.set_ylabel("M", size=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def grids_of(results: dict[str, Any]) -> dict[str, Cells]:
    """The cells of the grids in which something was measured, by title."""
    grids = {grid_title(*which): cells_of(results, *which) for which in GRIDS}
    return {title: found for title, found in grids.items() if found}


def grid_height(found: Cells) -> float:
    """Inches of a grid with its labels and title."""
    return CELL_HEIGHT * len({m for m, _ in found}) + 0.9


def grids_width(grids: dict[str, Cells]) -> float:
    """Inches of the widest grid with its labels."""
    return 1.2 + CELL_WIDTH * max((len({rest for _, rest in found}) for found in grids.values()), default=0)


def draw_grids(panels: Iterable[Axes], grids: dict[str, Cells]) -> None:
    """A heat map in each panel."""
    for axes, (title, found) in zip(panels, grids.items(), strict=True):
        draw_grid(axes, found)
        axes.set_title(f"{title}: times as fast as cuBLAS in fp32", size=8, loc="left", weight="bold")


def draw_heat_maps(results: dict[str, Any]) -> Figure | None:
    """The grids alone; None where none was measured."""
    grids = grids_of(results)
    if not grids:
        return None
    heights = [grid_height(found) for found in grids.values()]
    figure = Figure(figsize=(grids_width(grids), sum(heights) + 0.5), layout="constrained")
    draw_grids(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).ravel(), grids)
    figure.supxlabel(HATCHED, size=7)
    figure.suptitle(heading(results), size=7)
    return figure


def write_png(results: dict[str, Any], path: Path) -> bool:
    """Draw `results` into `path`; False where nothing was measured."""
    lines = [line for line in results["lines"] if line["speed_up"] is not None]
    if not lines:
        return False
    grids = grids_of(results)
    heights = [0.24 * len(lines) + 0.5, *(grid_height(found) for found in grids.values())]
    figure = Figure(figsize=(max(7.5, grids_width(grids)), sum(heights) + 0.6), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).ravel()
    draw_lines(panels[0], lines)
    draw_grids(panels[1:], grids)
    if grids:
        figure.supxlabel(HATCHED, size=7)
    figure.suptitle(heading(results), size=7)
    return save_png(figure, path)
