"""The reference suite beside the card's measured ceilings: products under a roofline, the others by bandwidth."""

from __future__ import annotations

from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.cases import reference_cases
from bench.ceilings import Work
from bench.plot import CONTENDER_COLOURS, GRID
from bench.report import heading, ordered

PYTORCH = ("eager", "compile", "max-autotune")
COLOURS = {"PyTorch": CONTENDER_COLOURS["compile"], "cutfuse": CONTENDER_COLOURS["cutfuse"]}
MARKERS = {"LinearSigmoidSum": "o", "GemmSigmoidScaleResidual": "s"}
ROOFS = {"bf16": "bf16, fp16", "tf32": "tf32", "fp32": "fp32 by three 16-bit products"}
LABELS = {"bf16": "bf16, fp16", "tf32": "tf32"}
INTENSITIES = (30.0, 2000.0)  # FLOP per byte that the plot shows
LABEL_AT = 1900.0


def fastest(case: dict[str, Any]) -> dict[str, float]:
    """The least time of PyTorch in microseconds, and cutfuse's."""
    entries = case["contenders"]
    return {
        "PyTorch": min(entries[name]["median_us"] for name in PYTORCH if "median_us" in entries.get(name, {})),
        "cutfuse": entries["cutfuse"]["median_us"],
    }


def works() -> dict[tuple[str, str, str], Work]:
    """What each case of the suite must move and compute, by model, shape and precision."""
    return {(case.group, case.shape, case.precision): case.work for case in reference_cases(False, False)}


def draw_roofs(axes: Axes, ceilings: dict[str, Any]) -> None:
    """The bandwidth's slope, and a level for each rate of products."""
    line = {"color": rcParams["text.color"], "linewidth": 0.9, "zorder": 1}
    for precision, label in ROOFS.items():
        rate = ceilings["product"][precision]
        start = rate / ceilings["read"]
        axes.plot([start, INTENSITIES[1]], [rate / 1e12] * 2, **line)
        axes.annotate(label, (LABEL_AT, rate / 1e12), xytext=(0, 3), textcoords="offset points", ha="right", size=7)
    highest = max(ceilings["product"].values())
    slope = [INTENSITIES[0], highest / ceilings["read"]]
    axes.plot(slope, [intensity * ceilings["read"] / 1e12 for intensity in slope], **line)
    at = 70.0
    label = f"{ceilings['read'] / 1e12:.2f} TB/s"
    axes.annotate(
        label, (at, at * ceilings["read"] / 1e12), xytext=(-4, 6), textcoords="offset points", ha="right", size=7
    )


def draw_products(axes: Axes, results: dict[str, Any], work: dict[tuple[str, str, str], Work]) -> None:
    """A point for each model with a product, precision and contender."""
    draw_roofs(axes, results["ceilings"])
    for case in results["cases"]:
        own = work[case["group"], case["shape"], case["precision"]]
        if case["group"] not in MARKERS:
            continue
        intensity = own.flops / (own.read_bytes + own.written_bytes)
        for name, time_us in fastest(case).items():
            rate = own.flops / time_us / 1e6
            axes.plot(
                intensity, rate, MARKERS[case["group"]], color=COLOURS[name], markersize=6, alpha=0.9, linestyle="none"
            )
            # Elsewhere the points of both contenders, and of both 16-bit types, are at one place.
            if case["precision"] == "fp32" or (name == "cutfuse" and case["precision"] in LABELS):
                text = LABELS.get(case["precision"], case["precision"])
                axes.annotate(text, (intensity, rate), xytext=(8, -9), textcoords="offset points", size=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*INTENSITIES)
    axes.set_ylim(30, 1400)
    axes.set_xticks([30, 100, 300, 1000], ["30", "100", "300", "1000"])
    axes.set_yticks([50, 100, 200, 400, 800], ["50", "100", "200", "400", "800"])
    axes.minorticks_off()
    axes.set_xlabel("FLOP per byte that has to be moved", size=8)
    axes.set_title("models with a product: TFLOP/s", size=9, loc="left", weight="bold")
    axes.grid(**GRID)


def draw_streams(axes: Axes, results: dict[str, Any], work: dict[tuple[str, str, str], Work]) -> None:
    """A pair of bars for each case whose least time is that of its memory traffic."""
    cases = [case for case in ordered(results) if not work[case["group"], case["shape"], case["precision"]].flops]
    ticks = []
    for index, case in enumerate(cases):
        for offset, (name, time_us) in zip((0.0, 0.4), fastest(case).items(), strict=True):
            share = 100 * case["floor_us"] / time_us
            axes.barh(index + offset, share, height=0.38, color=COLOURS[name])
            inside = share > 10
            axes.annotate(
                f"{share:.0f}%",
                (share, index + offset),
                xytext=(-3 if inside else 3, 0),
                textcoords="offset points",
                ha="right" if inside else "left",
                va="center",
                size=7,
                color="white" if inside else rcParams["text.color"],
            )
        ticks.append((index + 0.2, f"{case['group']} {case['precision']}"))
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks], size=7)
    axes.invert_yaxis()
    axes.axvline(100, color=rcParams["text.color"], linewidth=0.9)
    axes.set_xlim(0, 108)
    axes.set_xlabel("% of the measured bandwidth", size=8)
    axes.set_title("models that need no product", size=9, loc="left", weight="bold")
    axes.grid(axis="x", **GRID)
    axes.tick_params(axis="y", length=0)


def draw(results: dict[str, Any]) -> Figure | None:
    """The figure; None where the card's ceilings are not known."""
    if not results["ceilings"]:
        return None
    figure = Figure(figsize=(8, 8.6), layout="constrained")
    products, streams = figure.subplots(2, 1, height_ratios=(1.15, 1))
    work = works()
    draw_products(products, results, work)
    draw_streams(streams, results, work)
    for axes in (products, streams):
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    none = {"linestyle": "none", "markersize": 6}
    handles = [Line2D([], [], marker="o", color=colour, label=name, **none) for name, colour in COLOURS.items()]
    handles[0].set_label("PyTorch, the fastest of eager, torch.compile and max-autotune")
    handles += [
        Line2D([], [], marker=marker, color=rcParams["text.color"], label=name, **none)
        for name, marker in MARKERS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    figure.suptitle(heading(results), size=7)
    return figure
