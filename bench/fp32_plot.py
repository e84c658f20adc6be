"""The fp32 suite's plot: its goals, and a heat map of every grid."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.format import ratio as times
from bench.fp32_suite import GRIDS, WEIGHTS, cells_of
from bench.plot import CONTENDER_COLOURS, Panel, figure_of, finish, goal_panels
from bench.suite import Results

# As fast as cuBLAS is white. The ends are fixed, and twice as far as any target, so that plots of two runs compare.
COLOURS = LinearSegmentedColormap.from_list(
    "speed-up", [CONTENDER_COLOURS["compile"], "#ffffff", CONTENDER_COLOURS["cutfuse"]]
)
SCALE = LogNorm(1 / 8, 8, clip=True)
CELL_HEIGHT = 0.34  # inches
SIDES = ("top", "right", "left", "bottom")

Cells = dict[tuple[int, str], tuple[float, bool]]


def draw_grid(axes: Axes, found: Cells, title: str) -> None:
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
    axes.set_xticks(range(len(columns)), [str(rest).replace("x", "\nx") for rest in columns])
    axes.set_yticks(range(len(rows)), [str(m) for m in rows])
    axes.set_xlabel("N x K; hatched: cutfuse ran cuBLAS itself", size=8)
    axes.set_ylabel("M", size=8)
    finish(axes, title, open_sides=SIDES)
    axes.grid(visible=False)
    axes.tick_params(length=0)


def grid_panels(results: Results) -> list[Panel]:
    """A heat map of each grid in which something was measured."""
    panels: list[Panel] = []
    for group, contender in GRIDS:
        found = cells_of(results, group, contender)
        title = f"{group}, {WEIGHTS[contender]}: times as fast as cuBLAS in fp32"
        if found:
            panels.append(
                (CELL_HEIGHT * len({m for m, _ in found}) + 0.9, partial(draw_grid, found=found, title=title))
            )
    return panels


def draw(results: Results) -> Figure | None:
    """The figure; None where nothing was measured."""
    return figure_of(results, [*goal_panels(results), *grid_panels(results)], 7.5)
