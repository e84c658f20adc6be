"""The fp32 suite's plot: the lines' speed-ups beside their targets, and a heat map of every grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.fp32_report import GRIDS, WEIGHTS, cells_of, grid_title, times
from bench.plot import CONTENDER_COLOURS
from bench.report import heading

# As fast as cuBLAS is white. The ends are fixed, and twice as far as any target, so that plots of two runs compare.
COLOURS = LinearSegmentedColormap.from_list(
    "speed-up", [CONTENDER_COLOURS["compile"], "#ffffff", CONTENDER_COLOURS["cutfuse"]]
)
SCALE = LogNorm(1 / 8, 8, clip=True)
CELL_WIDTH, CELL_HEIGHT = 0.62, 0.34  # inches


def label_of(line: dict[str, Any]) -> str:
    """A line as its bar is labelled."""
    measure = f", {line['measure']}" if line["measure"] else ""
    return f"{line['line']}  {line['group']}{measure}, {WEIGHTS[line['contender']]}"


def draw_lines(axes: Axes, lines: list[dict[str, Any]]) -> None:
    """A bar for each line that was measured, and a mark at its target."""
    for index, line in enumerate(lines):
        value = line["speed_up"]
        axes.barh(index, value, height=0.7, color=CONTENDER_COLOURS["cutfuse"])
        axes.plot([line["at_least"]] * 2, [index - 0.42, index + 0.42], color="#333333", linewidth=1.6)
        reach = max(value, line["at_least"])
        text = f"{times(value)}, {line['verdict']}" if line["verdict"] else times(value)
        axes.annotate(text, (reach, index), xytext=(4, 0), textcoords="offset points", va="center", size=7)
    axes.set_yticks(range(len(lines)), [label_of(line) for line in lines], size=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(max(line["speed_up"], line["at_least"]) for line in lines))
    axes.set_title("times as fast as the fastest PyTorch; the mark is the target", size=8, loc="left", weight="bold")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_grid(axes: Axes, found: dict[tuple[int, str], tuple[float, bool]]) -> None:
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
        axes.annotate(times(value), (x, y), ha="center", va="center", size=7, bbox=behind)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [str(rest).replace("x", "\nx") for rest in columns], size=7)
    axes.set_yticks(range(len(rows)), [str(m) for m in rows], size=7)
    axes.set_xlabel("N x K", size=8)
    axes.set_ylabel("M", size=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def write_png(results: dict[str, Any], path: Path) -> bool:
    """Draw `results` into `path`; False where nothing was measured."""
    lines = [line for line in results["lines"] if line["speed_up"] is not None]
    grids = {grid_title(*which): cells_of(results, *which) for which in GRIDS}
    grids = {title: found for title, found in grids.items() if found}
    if not lines:
        return False
    heights = [0.24 * len(lines) + 0.5]
    heights += [CELL_HEIGHT * len({m for m, _ in found}) + 0.9 for found in grids.values()]
    widest = max((len({rest for _, rest in found}) for found in grids.values()), default=0)
    figure = Figure(figsize=(max(7.5, 1.2 + CELL_WIDTH * widest), sum(heights) + 0.6), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).ravel()
    draw_lines(panels[0], lines)
    for axes, (title, found) in zip(panels[1:], grids.items(), strict=True):
        draw_grid(axes, found)
        axes.set_title(f"{title}: times as fast as cuBLAS in fp32", size=8, loc="left", weight="bold")
    if grids:
        figure.supxlabel("hatched: cutfuse ran cuBLAS itself", size=7)
    figure.suptitle(heading(results), size=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True
