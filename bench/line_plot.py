"""A panel of bars: each line of a suite's table with its ratio, its cases' ratios and its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes

from bench.format import ratio
from bench.plot import CONTENDER_COLOURS, GRID


def draw_lines(
    axes: Axes, lines: Sequence[dict[str, Any]], labels: Sequence[str], cells: Sequence[list[float]], title: str
) -> None:
    """A bar for each line, a dot for each of its cases (`cells`), and a mark at its target."""
    longest = 1.0
    for place, (line, own) in enumerate(zip(lines, cells, strict=True)):
        axes.barh(place, line["ratio"], height=0.7, color=CONTENDER_COLOURS["cutfuse"])
        axes.plot(own, [place] * len(own), ".", color=CONTENDER_COLOURS["max-autotune"], markersize=3)
        ends = [line["ratio"], *own]
        if line["at_most"] is not None:
            axes.plot([line["at_most"]] * 2, [place - 0.42, place + 0.42], color=rcParams["text.color"], linewidth=1.6)
            ends.append(line["at_most"])
        text = f"{ratio(line['ratio'])}, {line['verdict']}" if line["verdict"] else ratio(line["ratio"])
        axes.annotate(text, (max(ends), place), xytext=(4, 0), textcoords="offset points", va="center", size=7)
        longest = max(longest, *ends)
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.set_yticks(range(len(lines)), labels, size=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * longest)
    axes.set_title(title, size=8, loc="left", weight="bold")
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
