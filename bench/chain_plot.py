"""The chains suite's plot: its goals beside their limits, and products from small to large."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.chain_suite import LINEAR, gflop, over_fastest, sizes_of
from bench.plot import CONTENDER_COLOURS, by_powers, figure_of, finish, goal_panels, scatter
from bench.suite import Figures, Results

PRECISION_COLOURS = {
    "bf16": CONTENDER_COLOURS["cutfuse"],
    "fp16": "#a17fc0",
    "tf32": CONTENDER_COLOURS["compile"],
    "fp32": "#6a9f58",
}
SCATTER_HEIGHT = 3.4  # inches
# Products of one shape lie side by side, by precision: factors of their place on the axis.
PLACES = {name: 1.09 ** (place - 1.5) for place, name in enumerate(PRECISION_COLOURS)}


def points_of(cases: Sequence[Figures]) -> dict[str, list[tuple[float, float]]]:
    """By precision, the products' size and the specialized kernel's time over the best of torch.compile."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        value = over_fastest(case) if case["group"] == LINEAR else None
        if value is not None:
            size = gflop(sizes_of(case)) * PLACES[case["precision"]]
            found.setdefault(case["precision"], []).append((size, value))
    return found


def draw_products(axes: Axes, results: Results) -> None:
    """A point for each product, by its size."""
    points = points_of(results["cases"])
    scatter(axes, points, PRECISION_COLOURS, 16, 1.2)
    by_powers(axes.yaxis, [1.0, *(value for own in points.values() for _, value in own)])
    axes.set_xlabel("GFLOP of the product", size=8)
    finish(axes, "a product with a chain, specialized: time / the best of torch.compile")


def draw(results: Results) -> Figure | None:
    """The figure; None where nothing was measured."""
    panels = goal_panels(results)
    if points_of(results["cases"]):
        panels.append((SCATTER_HEIGHT, lambda axes: draw_products(axes, results)))
    return figure_of(results, panels, 9)
