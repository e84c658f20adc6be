"""The error of one product against its time, for every precision."""

from __future__ import annotations

from matplotlib.figure import Figure

from bench.accuracy_suite import CUBLAS, GUARDED, TRADE_OFF
from bench.format import duration, error
from bench.plot import CONTENDER_COLOURS, by_powers, finish
from bench.report import heading
from bench.suite import Results

ALIGNMENTS = {"split3": "right", "split6": "left"}


def colour_of(name: str) -> str:
    """cutfuse's default stands out, and what it replaces."""
    return CONTENDER_COLOURS[{GUARDED: "cutfuse", CUBLAS: "compile"}.get(name, "eager")]


def draw(results: Results) -> Figure | None:
    """The figure; None where nothing was timed, or no product has an error to draw."""
    cases = [case for case in results["cases"] if case["group"] == TRADE_OFF]
    found = cases[0]["contenders"] if cases else {}
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
    by_powers(axes.xaxis, [entry["median_us"] for entry in points.values()], 1.7)
    errors = [entry["error"] for entry in points.values()]
    axes.set(yscale="log", ylim=(min(errors) / 8, max(errors) * 8))
    axes.set_xlabel("time in µs", size=8)
    axes.set_ylabel("relative Frobenius error against fp64", size=8)
    finish(axes, f"fp32 product of {cases[0]['shape']}, normal inputs")
    figure.suptitle(heading(results), size=7)
    return figure
