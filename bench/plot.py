"""Results as a PNG: bars of every contender, or, for the linear suite, of every epilogue over the bare product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench.format import duration, ratio
from bench.report import heading, ordered
from bench.workloads import PRECISIONS

# The labels of the groups from the top down, and for every bar in a group its length and its text.
Panel = tuple[list[str], dict[str, list[tuple[float, str] | None]]]

GRID: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.7}  # of the colour that the figure's theme gives it
BAR = 0.18  # inches of height for a bar with its label
LINEAR_SCALE_UP_TO = 8.0
CONTENDER_COLOURS = {
    "mm": "#b8b8b8",
    "eager": "#8fb3d9",
    "compile": "#4f81bd",
    "max-autotune": "#2f4f7f",
    "cutfuse": "#e8743b",
}
LABELS = {"mm": "torch.mm alone", "compile": "torch.compile"}
EPILOGUE_COLOURS = ("#4f81bd", "#8fb3d9", "#e8743b", "#b5502a", "#6a9f58", "#a17fc0", "#8c8c8c", "#d4a72c")


def horizontal_bars(
    axes: Axes, groups: list[str], series: dict[str, list[tuple[float, str] | None]], dots: bool = False
) -> None:
    """Grouped bars from the top down, each labelled; `dots` for a log axis, on which a bar's length means nothing."""
    position = 0.0
    ticks = []
    colours = dict(zip(series, EPILOGUE_COLOURS, strict=False))
    labelled: set[str] = set()
    for index, group in enumerate(groups):
        present = [(name, values[index]) for name, values in series.items() if values[index] is not None]
        ticks.append((position + (len(present) - 1) / 2, group))
        for name, bar in present:
            assert bar is not None
            length, text = bar
            colour = CONTENDER_COLOURS.get(name, colours.get(name))
            label = None if name in labelled else LABELS.get(name, name)
            labelled.add(name)
            if dots:
                axes.plot(length, position, "o", markersize=6, color=colour, label=label)
            else:
                axes.barh(position, length, height=0.86, color=colour, label=label)
            offset = 6 if dots else 3
            axes.annotate(text, (length, position), xytext=(offset, 0), textcoords="offset points", va="center", size=7)
            position += 1
        position += 0.8
    axes.set_yticks([tick for tick, _ in ticks], [group for _, group in ticks], size=8)
    axes.set_ylim(position - 0.3, -0.9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def unit(case: dict[str, Any]) -> float | None:
    """The time that a case's bars are multiples of: the floor, or eager's."""
    return case["floor_us"] or case["contenders"].get("eager", {}).get("median_us")


def contender_panel(cases: list[dict[str, Any]], names: list[str], suite: str) -> Panel:
    """Each case's contenders as multiples of its unit, labelled with their times."""
    cases = [case for case in cases if unit(case)]
    groups = []
    for case in cases:
        title = "  ".join(part for part in (case["group"], case["variant"]) if part not in ("", suite))
        groups.append(f"{title}\n{case['shape']}")
    series: dict[str, list[tuple[float, str] | None]] = {}
    for name in names:
        bars: list[tuple[float, str] | None] = []
        for case in cases:
            median, base = case["contenders"].get(name, {}).get("median_us"), unit(case)
            bars.append(None if median is None or base is None else (median / base, duration(median)))
        if any(bars):
            series[name] = bars
    return groups, series


def epilogue_panel(cases: list[dict[str, Any]]) -> Panel:
    """Shapes, and for every epilogue cutfuse's time over torch.mm's."""
    found = {(case["shape"], case["variant"]): case["ratios"]["mm"] for case in cases if "mm" in case["ratios"]}
    shapes = list(dict.fromkeys(shape for shape, _ in found))
    series: dict[str, list[tuple[float, str] | None]] = {}
    for variant in dict.fromkeys(variant for _, variant in found):
        values = [found.get((shape, variant)) for shape in shapes]
        series[variant] = [None if value is None else (value, ratio(value)) for value in values]
    return shapes, series


def panels_of(results: dict[str, Any]) -> dict[str, Panel]:
    """One panel for each precision, without those in which nothing was measured."""
    cases = ordered(results)
    present = {case["precision"] for case in cases}
    panels = {}
    for precision in (name for name in PRECISIONS if name in present):
        own = [case for case in cases if case["precision"] == precision]
        if results["suite"] == "linear":
            panel = epilogue_panel(own)
        else:
            panel = contender_panel(own, results["settings"]["contenders"], results["suite"])
        if panel[1]:
            panels[precision] = panel
    return panels


def lengths_of(panels: dict[str, Panel]) -> list[float]:
    """The lengths of all bars."""
    return [bar[0] for _, series in panels.values() for bars in series.values() for bar in bars if bar]


def scale(axes: Axes, panels: dict[str, Panel]) -> None:
    """From zero, or by powers where one bar would make the others too short to tell apart."""
    lengths = lengths_of(panels)
    longest = max(lengths)
    if longest <= LINEAR_SCALE_UP_TO:
        axes.set_xlim(0, longest * 1.16)
        return
    left, right = min(0.5, 0.7 * min(lengths)), longest * 2
    ticks = [step * 10.0**power for power in range(-3, 6) for step in (1, 2, 5)]
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    axes.set_xticks([tick for tick in ticks if left <= tick <= right])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def draw(results: dict[str, Any]) -> Figure | None:
    """The figure; None where nothing was measured."""
    panels = panels_of(results)
    if not panels:
        return None
    bars = max(sum(bar is not None for bars in series.values() for bar in bars) for _, series in panels.values())
    height = BAR * (bars + 0.8 * max(len(groups) for groups, _ in panels.values())) + 0.6
    figure = Figure(figsize=(8, len(panels) * height + 0.9), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False).ravel()
    if results["suite"] == "linear":
        label = "cutfuse / torch.mm alone (1: the epilogue is free)"
    else:
        has_floor = all(case["floor_us"] for case in results["cases"])
        label = "time / floor from the card's measured ceilings" if has_floor else "time / eager"
    is_log = max(lengths_of(panels)) > LINEAR_SCALE_UP_TO
    for axes, (name, (groups, series)) in zip(grid, panels.items(), strict=True):
        horizontal_bars(axes, groups, series, dots=is_log)
        scale(axes, panels)
        axes.axvline(1, color=rcParams["text.color"], linewidth=0.9)
        axes.set_title(name, size=10, loc="left", weight="bold")
        axes.set_xlabel(label, size=8)
        axes.tick_params(axis="x", labelsize=8)
    # A panel may lack a contender that another has: the legend is of all.
    handles = {text: handle for axes in grid for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(heading(results), size=7)
    return figure


def save_png(figure: Figure | None, path: Path) -> bool:
    """Write a figure, if there is one, and say whether there is."""
    if figure is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def write_png(results: dict[str, Any], path: Path) -> bool:
    """Draw `results` into `path`; False where nothing was measured."""
    return save_png(draw(results), path)
