"""The explanation of a model as a table with bars: as text, as HTML for a notebook, and as a page of its own."""

from __future__ import annotations

import html
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..prediction import described
from ..printing import bar_characters

if TYPE_CHECKING:
    from .report import ModelExplanation, ProductReport

_NO_GRAPH = (
    "torch.compile makes no graph of it, as of nn.LSTM and of modules with full backward hooks; "
    "TORCH_LOGS=graph_breaks prints the reason"
)
_COUNTED = (
    "Counted are the products, with what is fused with them or could have been. Attention, norms, embeddings and all "
    "other operations are not. Before is torch.compile without cutfuse: cuBLAS's product and one kernel for what "
    "follows. Eager code, with a kernel for each operation, is not predicted. A time is the longer one of the device's "
    "and the host's, and a share of the host's."
)
_UNCOUNTED = "Products without times are not predicted, and not counted."
_STEPS = "Times marked * are of a training step, forwards and backwards; the others are of the forward pass."
_PIPE_WIDTH = 100
_MARGIN = 8  # of what is behind the verdicts
_TITLES = ("", "module", "M x N x K", "times", "before, us", "after, us", "", "fused, and why no more")
_GREEN, _GREY = ("\033[32m", "#2da44e"), ("\033[90m", "#8c959f")
_COLOURS = {"fused": _GREEN, "product": _GREEN, "joined": _GREEN, "left": _GREY}
_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --text: #e6edf3; --line: #3d444d; } }
body { background: var(--page); color: var(--text); font: 14px/1.45 system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid var(--line); padding: 0.35rem 0.6rem; }
"""


class Row(NamedTuple):
    """Products that differ in the numbers of their modules alone, as those of equal layers do.

    verdict: "fused", "product" for a kernel of cutfuse's with nothing behind the product, "joined" or "left". before,
    after: microseconds of all of them; None where nothing is predicted.
    """

    verdict: str
    occurrences: int
    product: ProductReport
    before: float | None
    after: float | None


def rows_of(found: ModelExplanation) -> list[Row]:
    groups: dict[Any, list[ProductReport]] = {}
    for product in found.products:
        key = product._replace(module=".".join(part for part in product.module.split(".") if not part.isdigit()))
        groups.setdefault(key, []).append(product)
    rows = []
    for first, *others in groups.values():
        own = "product" if first.is_alone else "fused"
        verdict, count = own if first.is_fused else "joined" if first.is_joined else "left", 1 + len(others)
        before, after = (None, None) if first.times is None else (count * time for time in first.times[:2])
        rows.append(Row(verdict, count, first, before, after))
    return rows


def _headlines(found: ModelExplanation) -> list[str]:
    lines = [f"{found.fused} of {len(found.products)} products are fused, in {found.graphs} graph"]
    lines[0] += "" if found.graphs == 1 else "s"
    alone = sum(product.is_alone for product in found.products)
    if alone:
        lines[0] += f"; of {alone} more a kernel of cutfuse's computes the product alone"
    if found.device is not None:
        lines.append(described(found.device))
    if not found.graphs:
        lines.append(_NO_GRAPH)
    for kind, before, after in _sums(found):
        less = f"{1 - after / before:.1%} less" if after <= before else "more"
        lines.append(f"predicted, {kind}: {before:,.1f} us before, by torch.compile, and {after:,.1f} us after, {less}")
    return lines


def _sums(found: ModelExplanation) -> list[tuple[str, float, float]]:
    """The sums before and after of each kind of times, of which a trained model has two."""
    kinds = [("forward", found.before, found.after), ("training steps*", found.step_before, found.step_after)]
    return [kind for kind in kinds if kind[1]]


def _notes(found: ModelExplanation) -> list[str]:
    times = [product.times for product in found.products]
    if not any(times):
        return []
    is_step = any(time is not None and time.is_step for time in times)
    return [_COUNTED, *([] if all(times) else [_UNCOUNTED]), *([_STEPS] if is_step else [])]


def _size_of(product: ProductReport) -> str:
    return f"{product.m} x {product.n} x {product.k} {str(product.dtype).removeprefix('torch.')}"


def _reason_of(product: ProductReport) -> str:
    return (f"ends at {product.ended_at}: " if product.ended_at else "") + product.reason


def _time(row: Row, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}{'*' if row.product.times is not None and row.product.times.is_step else ''}"


def _scale(rows: list[Row]) -> float:
    return max((max(row.before, row.after or 0.0) for row in rows if row.before is not None), default=0.0)


def text_of(found: ModelExplanation) -> str:
    """Text as wide as the terminal that it is printed to, up to 120 columns. A terminal has colours too."""
    is_terminal = sys.stdout.isatty()
    width = min(max(shutil.get_terminal_size().columns, 60), 120) if is_terminal else _PIPE_WIDTH
    has_colours = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    characters = bar_characters(getattr(sys.stdout, "encoding", None) or "utf-8")
    rows, bar = rows_of(found), width // 5
    scale, module = _scale(rows), width - bar - 29 - _MARGIN  # what the other columns take
    lines = [line for headline in _headlines(found) for line in textwrap.wrap(headline, width)]
    if scale:
        lines.append(f"{'':{_MARGIN}}{'':{module}} times    before   after us")
    for row in rows:
        name = row.product.module if not scale else _clipped(row.product.module, module)
        times = f"{_time(row, row.before):>10}{_time(row, row.after):>10}" if scale else ""
        line = f"{row.verdict:{_MARGIN}}{name:{module}}{f'{row.occurrences}x':>6}{times}"
        if row.before is not None and row.after is not None:
            drawn = _bar(row.before / scale * bar, row.after / scale * bar, characters)
            line += f"  {_COLOURS[row.verdict][0]}{drawn}\033[0m" if has_colours else f"  {drawn}"
        program = f": {row.product.program}" if row.product.program else ""
        for detail in (f"{_size_of(row.product)}{program}", _reason_of(row.product)):
            line += "".join(f"\n{part}" for part in _indented(detail, width))
        lines.append(line)
    if scale:
        lines += [
            f"{'':{_MARGIN}}{f'sum, {kind}':{module + 6}}{before:10,.1f}{after:10,.1f}"
            for kind, before, after in _sums(found)
        ]
    return "\n".join([*lines, *(line for note in _notes(found) for line in textwrap.wrap(note, width))])


def _clipped(name: str, width: int) -> str:
    return name if len(name) <= width else f"..{name[2 - width :]}"


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=" " * _MARGIN, subsequent_indent=" " * (_MARGIN + 2), break_on_hyphens=False
    )


def _bar(before: float, after: float, characters: str) -> str:
    filled = max(round(after), 1)
    return characters[0] * filled + characters[1] * (round(before) - filled)


def html_of(found: ModelExplanation) -> str:
    """A table. Colours are the bars' alone, and are seen on light and dark pages."""
    rows = rows_of(found)
    scale = _scale(rows)
    caption = "<br/>".join(map(html.escape, _headlines(found)))
    body = "".join(_html_row(row, scale) for row in rows)
    totals = [
        ["", f"sum, {kind}", "", "", f"{before:,.1f}", f"{after:,.1f}", "", ""] for kind, before, after in _sums(found)
    ]
    foot = f"<tfoot>{''.join(map(_cells, totals))}</tfoot>" if scale else ""
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in _notes(found))
    return (
        f'<div><table><caption style="text-align: left; font-weight: bold">{caption}</caption>'
        f"<thead>{_cells(_TITLES, 'th')}</thead><tbody>{body}</tbody>{foot}</table>{notes}</div>"
    )


def _html_row(row: Row, scale: float) -> str:
    product, colour = row.product, _COLOURS[row.verdict][1]
    bar = ""
    if row.before is not None and row.after is not None:
        parts = (row.after, 1.0), (max(row.before - row.after, 0.0), 0.3)
        bar = '<div style="display: flex; width: 12em">{}</div>'.format(
            "".join(
                f'<div style="height: 1em; width: {part / scale:.1%}; background: {colour}; opacity: {opacity}"></div>'
                for part, opacity in parts
            )
        )
    told = [text for text in (product.program, _reason_of(product)) if text]
    times = [_time(row, row.before), _time(row, row.after)]
    cells = [product.module, _size_of(product), str(row.occurrences), *times]
    return _cells([f"<b>{row.verdict}</b>", *map(html.escape, cells), bar, "<br/>".join(map(html.escape, told))])


def _cells(cells: Sequence[str], tag: str = "td") -> str:
    """A row of HTML: numbers to the right, and in one line all but what is fused and why."""
    found = []
    for place, cell in enumerate(cells, 1):
        side, wraps = "right" if 4 <= place <= 6 else "left", "normal" if place == len(cells) else "nowrap"
        found.append(f'<{tag} style="text-align: {side}; white-space: {wraps}">{cell}</{tag}>')
    return f"<tr>{''.join(found)}</tr>"


def page_of(found: ModelExplanation) -> str:
    """A page that needs no other file, light or dark as the reader's system is."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>cutfuse.explain_model</title>'
        f"<style>{_STYLE}</style></head><body>{html_of(found)}</body></html>\n"
    )
