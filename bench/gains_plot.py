"""The README's chart: how many times as fast as PyTorch each kind of work is."""

from __future__ import annotations

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.gains import SUITES, gains
from bench.plot import CONTENDER_COLOURS, horizontal
from bench.report import heading
from bench.results import committed
from bench.suite import Results


def draw(_: Results) -> Figure:
    """A bar for the mean of each kind of work, and a dot for each case."""
    figure = Figure(figsize=(8.5, 3.7), layout="constrained")
    axes: Axes = figure.subplots()
    found = list(gains())
    for place, gain in enumerate(found):
        axes.barh(place, gain.mean, height=0.66, color=CONTENDER_COLOURS["cutfuse"])
        axes.plot(gain.times, [place] * len(gain.times), ".", color=CONTENDER_COLOURS["compile"], markersize=4)
        text = f"{gain.mean:.2f}, best {max(gain.times):.2f}"
        ends = (max(*gain.times, gain.mean), place)
        axes.annotate(text, ends, xytext=(6, 0), textcoords="offset points", va="center", size=8)
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.9)
    axes.set_xlim(0, 1.2 * max(max(gain.times) for gain in found))
    title = "Times as fast as PyTorch: bars are geometric means, dots are cases"
    horizontal(axes, [gain.name for gain in found], title)
    figure.suptitle("\n".join(heading(committed(suite)) for suite in SUITES), size=6)
    return figure
