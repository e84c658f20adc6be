"""The accuracy suite's plot: the error of one product against its time, for every precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench.accuracy_suite import CUBLAS, GUARDED
from bench.format import duration, error
from bench.plot import CONTENDER_COLOURS, GRID, save_png
from bench.report import heading

ALIGNMENTS = {"split3": "right", "split6": "left"}
TICKS_US = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))


def colour_of(name: str) -> str:
    """cutfuse's default stands out, and what it replaces."""
    return CONTENDER_COLOURS[{GUARDED: "cutfuse", CUBLAS: "compile"}.get(name, "eager")]


def draw(results: dict[str, Any]) -> Figure | None:
    """The figure; None where nothing was timed, or no product has an error to draw."""
    found = (results["trade_off"] or {"contenders": {}})["contenders"]
    points = {name: entry for name, entry in found.items() if "median_us" in entry and entry["error"]}
    if not points:
        return None
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
    for name, entry in points.items():
        x, y = entry["median_us"], entry["error"]
        is_default = name == GUARDED  # drawn last and larger, because split3 lies beneath it
        axes.scatter(x, y, s=80 if is_default else 46, color=colour_of(name), zorder=4 if is_default else 3)
        # split3 is what "guarded" runs on these inputs: their labels go to opposite sides of their points. split6's is
        # near them both.
        above = name in (GUARDED, CUBLAS)
        axes.annotate(
            f"{name}{' (the default)' if is_default else ''}\n{duration(x)}, {error(y)}",
            (x, y),
            xytext=(0, 8 if above else -8),
            textcoords="offset points",
            ha=ALIGNMENTS.get(name, "center"),
            va="bottom" if above else "top",
            size=8,
            weight="bold" if is_default else "normal",
            color=colour_of(name) if is_default else None,
        )
    times = [entry["median_us"] for entry in points.values()]
    errors = [entry["error"] for entry in points.values()]
    left, right = min(times) / 1.7, max(times) * 1.7
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(min(errors) / 8, max(errors) * 8)
    axes.set_xticks([tick for tick in TICKS_US if left <= tick <= right])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("time in µs", size=8)
    axes.set_ylabel("relative Frobenius error against fp64", size=8)
    axes.tick_params(labelsize=8)
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"fp32 product of {results['trade_off']['shape']}, normal inputs", size=9, loc="left", weight="bold")
    figure.suptitle(heading(results), size=7)
    return figure


def write_png(results: dict[str, Any], path: Path) -> bool:
    """Draw `results` into `path`; False where there is nothing to draw."""
    return save_png(draw(results), path)
