"""The documentation's plots, from the committed results: `python -m bench.figures`.

Each is an SVG for light and one for dark pages, without a background of its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench import accuracy_plot, chain_plot, fp32_plot, gains_plot, host_plot, model_plot, plot, report, roofline_plot

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
# The name of each plot, the suite whose results it shows, and what draws it.
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure | None]]] = {
    "reference": ("reference", plot.draw),
    "roofline": ("reference", roofline_plot.draw),
    "error-and-time": ("fp32", accuracy_plot.draw),
    "speed-by-shape": ("fp32", fp32_plot.draw_heat_maps),
    "chains": ("chains", chain_plot.draw),
    "host": ("host", host_plot.draw),
    "models": ("models", model_plot.draw),
    "gains": ("models", gains_plot.draw),
}
FONTS = ["DejaVu Sans", "Verdana"]  # the first is matplotlib's own, by which it measures text
INKS = {"light": "#24292f", "dark": "#d0d7de"}


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


def render(draw: Callable[[dict[str, Any]], Figure | None], results: dict[str, Any], ink: str) -> str:
    """A plot as SVG.

    Raises ValueError where the results have nothing to draw.
    """
    with matplotlib.rc_context(theme(ink)):
        figure = draw(results)
        if figure is None:
            raise ValueError(f"the results of {results['suite']} have nothing to draw")
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return compact(written.getvalue())


def compact(svg: str) -> str:
    """The same drawing in fewer characters: two decimals, and no comments."""
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)  # not the text between tags
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def main() -> None:
    """Write every plot."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, (suite, draw) in FIGURES.items():
        results = report.committed(suite)
        for kind, ink in INKS.items():
            path = IMAGES / f"{name}-{kind}.svg"
            path.write_text(render(draw, results, ink), encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
