"""The documentation's plots, from the committed results: `python -m bench figures`.

Each is an SVG for light and one for dark pages, without a background of its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench.results import committed, committed_suites
from bench.suite import Results, suite_of

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
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


def render(draw: Callable[[Results], Figure | None], results: Results, ink: str) -> str:
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


def plots() -> Iterator[tuple[str, str, Callable[[Results], Figure | None]]]:
    """Each plot's name, the suite whose results it shows, and what draws it."""
    for suite in committed_suites():
        for name, function in suite_of(suite).plots.items():
            yield name, suite, resolve_name(function)
    yield "gains", "models", resolve_name("bench.gains_plot:draw")  # of several suites, for the README


def write() -> None:
    """Write every plot."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, suite, draw in plots():
        for kind, ink in INKS.items():
            path = IMAGES / f"{name}-{kind}.svg"
            path.write_text(render(draw, committed(suite), ink), encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
