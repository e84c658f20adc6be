"""The plots of suites' results: panels below each other, of bars, of dots, of points between two axes, or of cells.

`python -m bench figures` writes those of the documentation, of the committed results: each is an SVG for light and one
for dark pages, without a background of its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from bench import accuracy_suite, chain_suite, fp32_suite, head_suite, host_suite, launches, model_suite
from bench import gains as readme
from bench.goals import Line, figure_of, heading, lines_of, value_text
from bench.model_suite import FULL_BATCH, GPU, SMALL_BATCH, WALL, over
from bench.model_zoo import FORWARD, TRAINING
from bench.results import committed, committed_suites
from bench.suite import Results, suite_of
from bench.tables import duration, error, ratio
from bench.workloads import PRECISIONS

GRID: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.7}  # of the colour that the figure's theme gives it
COLOURS = {
    "mm": "#b8b8b8",
    "eager": "#8fb3d9",
    "compile": "#4f81bd",
    "max-autotune": "#2f4f7f",
    "compile-graphs": "#2f4f7f",
    "cutfuse": "#e8743b",
    "cutfuse-graphs": "#b5502a",
    "bf16": "#e8743b",
    "fp16": "#a17fc0",
    "tf32": "#4f81bd",
    "fp32": "#6a9f58",
}
# In inches: the height of a panel's title and axis, of a row of bars or of dots, of a cell, and of points.
FRAME, ROW, CELL_HEIGHT, POINTS_HEIGHT = 0.9, 0.26, 0.34, 3.0
TICKS = tuple(step * 10.0**power for power in range(-10, 7) for step in (1, 2, 5))
MOST_TICKS = 12  # more of them would run into each other

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
FONTS = ["DejaVu Sans", "Verdana"]  # the first is matplotlib's own, by which it measures text
INKS = {"light": "#24292f", "dark": "#d0d7de"}

Draw = Callable[[Results], Figure | None]
Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """A panel's height in inches, and what draws it."""

    height: float
    draw: Callable[[Axes], None]


class Bar(NamedTuple):
    """A bar for a value with a text behind it, dots for the cases that it is of, and a mark at its limit."""

    label: str
    value: float
    cells: Sequence[float]
    text: str
    limit: float | None = None


class Dot(NamedTuple):
    """A value of a contender, with a text above it."""

    value: float
    name: str
    is_filled: bool = True
    text: str = ""


def finish(axes: Axes, title: str, grid: str = "both", open_sides: Sequence[str] = ("top", "right")) -> None:
    """A panel's title, grid and frame."""
    axes.set_title(title, size=8, loc="left", weight="bold")
    axes.grid(axis=grid, **GRID)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7)
    axes.spines[list(open_sides)].set_visible(False)


def by_powers(axis: Axis, values: Sequence[float], margin: float = 1.2) -> None:
    """An axis on which twice as much is as far as half as much."""
    low, high = min(values) / margin, max(values) * margin
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axis.set_ticks(ticks if len(ticks) <= MOST_TICKS else [tick for tick in ticks if tick in TICKS[::3]])
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def horizontal(axes: Axes, labels: Sequence[str], title: str) -> None:
    """Rows from the top down with a label each, and a line where the value is 1."""
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    finish(axes, title, "x", ("top", "right", "left"))
    axes.tick_params(axis="y", length=0)


def draw_bars(axes: Axes, bars: Sequence[Bar], title: str) -> None:
    """A row for each bar."""
    longest = 1.0
    for place, bar in enumerate(bars):
        axes.barh(place, bar.value, height=0.7, color=COLOURS["cutfuse"])
        axes.plot(bar.cells, [place] * len(bar.cells), ".", color=COLOURS["max-autotune"], markersize=3)
        ends = [bar.value, *bar.cells]
        if bar.limit is not None:
            axes.plot([bar.limit] * 2, [place - 0.42, place + 0.42], color=rcParams["text.color"], linewidth=1.6)
            ends.append(bar.limit)
        axes.annotate(bar.text, (max(ends), place), xytext=(4, 0), textcoords="offset points", va="center", size=7)
        longest = max(longest, *ends)
    axes.set_xlim(0, 1.25 * longest)
    horizontal(axes, [bar.label for bar in bars], title)


def bars_panel(bars: Sequence[Bar], title: str) -> Panel:
    """A panel of bars."""
    return Panel(ROW * len(bars) + FRAME, partial(draw_bars, bars=bars, title=title))


def dots_panels(rows: Mapping[str, Sequence[Dot]], labels: Mapping[str, str], title: str) -> list[Panel]:
    """A panel with a row for each label and its dots; none where no row has any. `labels`: of the contenders."""
    rows = {label: dots for label, dots in rows.items() if dots}

    def draw(axes: Axes) -> None:
        for place, dots in enumerate(rows.values()):
            for dot in dots:
                colour = COLOURS[dot.name]
                fill = colour if dot.is_filled else "none"
                axes.plot(dot.value, place, "o", markersize=5, markeredgecolor=colour, markerfacecolor=fill)
                if dot.text:
                    ends = (dot.value, place)
                    axes.annotate(dot.text, ends, xytext=(0, 5), textcoords="offset points", ha="center", size=6)
        shown = {dot.name for dots in rows.values() for dot in dots}
        for name in [name for name in labels if name in shown]:
            axes.plot([], [], "o", color=COLOURS[name], label=labels[name])
        by_powers(axes.xaxis, [1.0, *(dot.value for dots in rows.values() for dot in dots)])
        axes.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
        horizontal(axes, list(rows), title)

    return [Panel(ROW * len(rows) + FRAME, draw)] if rows else []


def points_panels(points: Mapping[str, Points], title: str, x: str, y: str, style: str = ".") -> list[Panel]:
    """A panel of points by their names between two axes by powers, which `x` and `y` say what is on; or none."""
    points = {name: sorted(own) for name, own in points.items() if own}

    def draw(axes: Axes) -> None:
        for name, own in points.items():
            axes.plot(*zip(*own, strict=True), style, color=COLOURS.get(name), label=name, linewidth=1.2)
        by_powers(axes.xaxis, [value for own in points.values() for value, _ in own])
        by_powers(axes.yaxis, [value for own in points.values() for _, value in own])
        axes.set_xlabel(x, size=8)
        axes.set_ylabel(y, size=8)
        axes.legend(frameon=False, fontsize=6)
        finish(axes, title)

    return [Panel(POINTS_HEIGHT, draw)] if points else []


def bar_of(line: Line) -> Bar:
    """The bar of a goal that was measured."""
    value = line.value or 0.0
    text = ", ".join(filter(None, [value_text(line.goal, value), line.verdict]))
    return Bar(f"{line.goal.what}, {line.goal.measure}", value, [own for own, _ in line.cells], text, line.goal.limit)


def goal_panels(results: Results) -> list[Panel]:
    """A panel for each kind of goals of which something was measured: those with an upper limit, and the others."""
    titles = {False: "at most the mark: dots are cases", True: "at least the mark: dots are cases"}
    measured = [line for line in lines_of(results) if line.value not in (None, float("inf")) and not line.goal.unit]
    kinds = {
        title: [bar_of(line) for line in measured if line.goal.is_least == least] for least, title in titles.items()
    }
    return [bars_panel(own, title) for title, own in kinds.items() if own]


def drawn(panels: Sequence[Panel], *headings: str) -> Figure | None:
    """Panels below each other under what was run where; None where there is no panel."""
    if not panels:
        return None
    heights = [panel.height for panel in panels]
    figure = Figure(figsize=(8.5, sum(heights) + 0.5), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).ravel()
    for axes, panel in zip(grid, panels, strict=True):
        panel.draw(axes)
    figure.suptitle("\n".join(headings), size=7)
    return figure


PLOTS: dict[str, Draw] = {}


def plotted(name: str) -> Callable[[Callable[[Results], Iterable[Panel]]], Draw]:
    """The plot of a name is of the panels that a function gives, under what was run where."""

    def add(panels_of: Callable[[Results], Iterable[Panel]]) -> Draw:
        return PLOTS.setdefault(name, lambda results: drawn([*panels_of(results)], heading(results)))

    return add


@plotted("reference")
def reference(results: Results) -> Iterator[Panel]:
    """Every contender's time over the floor that the card's measured ceilings give, or over eager's."""
    labels = {name: own.label for name, own in launches.CONTENDERS.items()}
    for precision in PRECISIONS:
        rows: dict[str, list[Dot]] = {}
        over_what = "eager"
        for case in results["cases"]:
            base = case.get("floor_us") or figure_of(case, "eager")
            times = {name: time for name in case["contenders"] if (time := figure_of(case, name))}
            if case["precision"] == precision and base:
                over_what = "the floor" if case.get("floor_us") else "eager"
                rows[f"{case['group']} {case['shape']}"] = [
                    Dot(time / base, name, text=duration(time) if name == launches.FUSED else "")
                    for name, time in times.items()
                ]
        yield from dots_panels(rows, labels, f"{precision}: time / {over_what}, and cutfuse's time")


@plotted("models")
def models(results: Results) -> Iterator[Panel]:
    """The goals, and each model's times over PyTorch's: a dot for the GPU's, and a ring for the wall clock's."""
    yield from goal_panels(results)
    labels = {name: own.label for name, own in model_suite.CONTENDERS.items()}
    for kind, load in ((FORWARD, SMALL_BATCH), (FORWARD, FULL_BATCH), (TRAINING, FULL_BATCH)):
        for precision in ("bf16", "fp32"):
            key = (kind, load, precision)
            cases = [case for case in results["cases"] if (case["variant"], case["load"], case["precision"]) == key]
            rows = {
                f"{case['group']}, {case['shape']}": [
                    Dot(value, name, is_filled=figure == GPU)
                    for name, own in model_suite.CONTENDERS.items()
                    for figure in (GPU, WALL)
                    if (value := over(own, model_suite.FASTER, figure, case)) is not None
                ]
                for case in cases
            }
            title = f"{kind}, {precision}, {load} batch: time / faster of both; filled: GPU, rings: wall"
            yield from dots_panels(rows, labels, title)


@plotted("chains")
def chains(results: Results) -> Iterator[Panel]:
    """The goals, and products from small to large."""
    points: dict[str, list[tuple[float, float]]] = {precision: [] for precision in PRECISIONS}
    # Products of one shape lie side by side, by precision: factors of their place on the axis.
    places = {name: 1.09 ** (place - 1.5) for place, name in enumerate(PRECISIONS)}
    for case in results["cases"]:
        value = chain_suite.over_fastest(case) if case["group"] == chain_suite.LINEAR else None
        if value is not None:
            size = chain_suite.gflop(chain_suite.sizes_of(case)) * places[case["precision"]]
            points[case["precision"]].append((size, value))
    title = "a product with a chain, specialized: time / the best of torch.compile"
    yield from goal_panels(results)
    yield from points_panels(points, title, "GFLOP of the product", "")


@plotted("host")
def host(results: Results) -> Iterator[Panel]:
    """The goals, and fp32 calls from small to large."""
    points: dict[str, list[tuple[float, float]]] = {}
    for case in results["cases"]:
        value, time = host_suite.over_pytorch(case), figure_of(case, launches.PYTORCH)
        drawn = (host_suite.DRAWN_GELU.name, host_suite.DRAWN_BARE.name)
        if case["group"] in drawn and value is not None and time is not None:
            points.setdefault(case["group"], []).append((time, value))
    title = "fp32 with M, N and K drawn at random"
    yield from goal_panels(results)
    yield from points_panels(points, title, "PyTorch's whole time in µs", "cutfuse / PyTorch")


def head_points(results: Results, head: str, name: str, unit: float) -> dict[str, Points]:
    """A figure of each contender's training steps of a head, by tokens."""
    found: dict[str, Points] = {}
    for contender in head_suite.NAMES:
        found[launches.CONTENDERS[contender].label] = [
            (case["tokens"], value / unit)
            for case in results["cases"]
            if (case["group"], case["variant"]) == (head, head_suite.TRAINING)
            and (value := figure_of(case, contender, name))
        ]
    return found


@plotted("head")
def head(results: Results) -> Iterator[Panel]:
    """The goals, and time and memory of a training step against tokens."""
    yield from goal_panels(results)
    for own in head_suite.HEADS:
        for name, scale, unit in (("median_us", 1e3, "ms"), ("peak_bytes", 1e9, "GB")):
            points = head_points(results, own.name, name, scale)
            yield from points_panels(points, f"{own.name}: a training step", "tokens", unit, ".-")


@plotted("error-and-time")
def error_and_time(results: Results) -> Iterator[Panel]:
    """The error of one product against its time, for every precision."""
    for case in (case for case in results["cases"] if case["group"] == accuracy_suite.TRADE_OFF):
        points: dict[str, Points] = {}
        # The default is drawn last, because split3, which it runs on these inputs, lies beneath it.
        for name, entry in sorted(case["contenders"].items(), key=lambda own: own[0] == accuracy_suite.GUARDED):
            if "median_us" in entry and entry["error"]:
                time, own = entry["median_us"], entry["error"]
                default = " (the default)" if name == accuracy_suite.GUARDED else ""
                points[f"{name}{default}: {duration(time)}, {error(own)}"] = [(time, own)]
        title = f"fp32 product of {case['shape']}, normal inputs"
        yield from points_panels(points, title, "time in µs", "relative Frobenius error against fp64", "o")


# As fast as cuBLAS is white. The ends are fixed, and twice as far as any target, so that plots of two runs compare.
SPEED_UPS = LinearSegmentedColormap.from_list("speed-up", [COLOURS["compile"], "#ffffff", COLOURS["cutfuse"]])
SCALE = LogNorm(1 / 8, 8, clip=True)


def draw_grid(axes: Axes, found: Mapping[tuple[int, str], tuple[float, bool]], title: str) -> None:
    """A coloured cell with its speed-up for each shape, hatched where cutfuse ran cuBLAS itself."""
    rows, columns = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    for (m, rest), (value, ran_cublas) in found.items():
        x, y = columns.index(rest), rows.index(m)
        hatch = "////" if ran_cublas else None
        cell = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=SPEED_UPS(SCALE(value)), edgecolor="#d0d0d0", hatch=hatch)
        axes.add_patch(cell)
        # The hatch must not run through the figure.
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if ran_cublas else None
        axes.annotate(ratio(value), (x, y), ha="center", va="center", size=7, color="black", bbox=behind)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [str(rest).replace("x", "\nx") for rest in columns])
    axes.set_yticks(range(len(rows)), [str(m) for m in rows])
    axes.set_xlabel("N x K; hatched: cutfuse ran cuBLAS itself", size=8)
    axes.set_ylabel("M", size=8)
    finish(axes, title, open_sides=("top", "right", "left", "bottom"))
    axes.grid(visible=False)
    axes.tick_params(length=0)


@plotted("fp32")
def fp32(results: Results) -> Iterator[Panel]:
    """The goals, and a heat map of every grid."""
    yield from goal_panels(results)
    for group, contender in fp32_suite.GRIDS:
        found = fp32_suite.cells_of(results, group, contender)
        title = f"{group}, {fp32_suite.WEIGHTS[contender]}: times as fast as cuBLAS in fp32"
        if found:
            height = CELL_HEIGHT * len({m for m, _ in found}) + FRAME
            yield Panel(height, partial(draw_grid, found=found, title=title))


def gains(_: Results) -> Figure | None:
    """The README's chart: how many times as fast as PyTorch each kind of work is."""
    bars = [
        Bar(gain.name, gain.mean, gain.times, f"{gain.mean:.2f}, best {max(gain.times):.2f}") for gain in readme.gains()
    ]
    title = "Times as fast as PyTorch: bars are geometric means, dots are cases"
    return drawn([bars_panel(bars, title)], *(heading(committed(suite)) for suite in readme.SUITES))


PLOTS["gains"] = gains


def theme(ink: str) -> dict[str, Any]:
    """matplotlib's settings for lines and text of one colour on the page's own background."""
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    plain = {"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none"}
    # Text stays text, which is small and found by a search; the salt makes two runs give the same file.
    return {
        **dict.fromkeys(names, ink),
        **plain,
        "svg.fonttype": "none",
        "svg.hashsalt": "cutfuse",
        "font.sans-serif": FONTS,
    }


def render(draw: Draw, results: Results, ink: str) -> str:
    """A plot as SVG.

    Raises ValueError where the results have nothing to draw.
    """
    with matplotlib.rc_context(theme(ink)):
        figure = draw(results)
        if figure is None:
            raise ValueError(f"the results of {results['suite']} have nothing to draw")
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    # The same drawing in fewer characters: two decimals but in the text between tags, and no comments.
    svg = re.sub(r"<!--.*?-->", "", written.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def documented() -> Iterator[tuple[str, str]]:
    """The documentation's plots: their names, and the suites whose results they show."""
    yield from ((name, suite) for suite in committed_suites() for name in suite_of(suite).plots)
    yield "gains", "models"  # of several suites, for the README


def write() -> None:
    """Write the documentation's plots."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, suite in documented():
        for kind, ink in INKS.items():
            path = IMAGES / f"{name}-{kind}.svg"
            path.write_text(render(PLOTS[name], committed(suite), ink), encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
