"""What became of each matrix product of a model: a table with bars, as text, as HTML for a notebook, and as a page."""

from __future__ import annotations

import html
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from ..layer.planner import plan_traced, precision_of, seen_size
from ..native import describe_prediction
from .choice import own_arguments, times_of
from .nodes import example_of, module_of, needs_gradient
from .products import Product
from .regions import Region, Search, Times

_OWN = "a layer of cutfuse's own, fused already: both times are its own"


class ProductReport(NamedTuple):
    """A product `[M, K] @ [K, N]` of a model.

    module: the path of its module. m, n, k: its sizes, in the call that was traced. is_fused: a kernel of cutfuse's
    computes it, with what follows. program: what is fused, as an expression of z and the operands r0, r1 ..; "z" where
    nothing follows, empty if nothing is fused. ended_at: the operation at which the region ended. reason: why it ended
    there, or why nothing was fused. times: what is predicted, None where nothing is. is_joined: one kernel computes it
    and others of the same input. is_trained: it has a gradient, so that a backward pass follows.
    """

    module: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    is_fused: bool
    program: str
    ended_at: str
    reason: str
    times: Times | None = None
    is_joined: bool = False
    is_trained: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether a kernel of cutfuse's computes the product, and nothing follows that is fused."""
        return self.is_fused and self.program == _ALONE


_ALONE = "z"  # the expression of a product with nothing behind it


@dataclass(frozen=True)
class ModelExplanation:
    """The products of a model, in the order in which they run. Print it, `save` it, or read `products`.

    It is a table with a bar for each product's predicted time, in a terminal and in a notebook too.

    graphs: how many graphs Dynamo made of the model. device: the card that this is predicted for, None where it is
    about the tensors' own device. trains: a product has a gradient. precision: `torch.get_float32_matmul_precision()`
    as it was, which decides what fp32 products are compared with. unlisted: the functions that hold products by weights
    of their own, which are not among `products`, and how often each is called.
    """

    products: tuple[ProductReport, ...]
    graphs: int
    device: str | None = None
    trains: bool = False
    precision: str = ""
    unlisted: Mapping[str, int] = field(default_factory=dict)

    @property
    def fused(self) -> int:
        """How many products have something fused."""
        return sum(product.is_fused and not product.is_alone for product in self.products)

    @property
    def before(self) -> float:
        """The microseconds that torch.compile's way is predicted to take: cuBLAS's product and one kernel behind it.

        It is the sum over the products of which a forward pass is predicted. `step_before` has the training steps.
        """
        return self._sum(is_step=False).before

    @property
    def after(self) -> float:
        """The same with cutfuse."""
        return self._sum(is_step=False).after

    @property
    def step_before(self) -> float:
        """As `before`, over the products of which a training step is predicted, forwards and backwards."""
        return self._sum(is_step=True).before

    @property
    def step_after(self) -> float:
        """As `after`, over these products."""
        return self._sum(is_step=True).after

    def _sum(self, is_step: bool) -> Times:
        own = [product.times for product in self.products if product.times and product.times.is_step == is_step]
        return Times(sum(times.before for times in own), sum(times.after for times in own), is_step)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as a page of HTML, in one file that needs no other."""
        Path(path).write_text(page_of(self), encoding="utf-8")

    def __str__(self) -> str:
        return text_of(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks. Its text has no colour of its own, so that it can be read on light and dark pages."""
        return html_of(self)


def report(search: Search, predicts: bool) -> ProductReport:
    """What became of one product; with times if it `predicts`."""
    region = search.region
    m, n, k = _sizes(search.product)
    return ProductReport(
        module=search.module,
        m=m,
        n=n,
        k=k,
        dtype=example_of(search.product.node).dtype,
        is_fused=region is not None,
        program="" if region is None else _expression(region),
        ended_at=search.ended_at,
        reason=search.reason,
        times=times_of(search) if predicts else None,
        is_trained=needs_gradient(search.product.node),
    )


def report_own(node: fx.Node, is_trained: bool) -> ProductReport:
    """A layer of cutfuse's, or one of its drop-in modules, which the compiler keeps."""
    given = own_arguments(node)
    plan = plan_traced(given, precision_of(given))
    reason = _OWN
    if plan is not None and not plan.is_fused:
        reason = (
            f"a layer of cutfuse's own: {plan.ruled_out or 'cuBLAS and one more kernel are predicted to be faster'}"
        )
    expression = repr(given.program.expression)
    m, n, k = _seen_sizes(given.x.shape[:-1], given.weight.shape[0], given.x.shape[-1])
    own = None if plan is None or plan.ruled_out else plan.alternatives[plan.chosen].compared
    return ProductReport(
        module=module_of(node),
        m=m,
        n=n,
        k=k,
        dtype=given.x.dtype,
        is_fused=plan is not None and plan.is_fused,
        program=expression if given.reduction == "none" else f"{given.reduction}({expression}, -1)",
        ended_at="",
        reason=reason,
        times=None if own is None else Times(own, own),
        is_trained=is_trained,
    )


def _expression(region: Region) -> str:
    expression = repr(region.epilogue.expression)
    if region.cross_entropy is not None:
        return f"cross_entropy({expression}, target)"
    return expression if region.reduction == "none" else f"{region.reduction}({expression}, -1)"


def _sizes(product: Product) -> tuple[int, int, int]:
    z, x = example_of(product.node), example_of(product.x)
    columns = z.shape[-1] if product.part is None else product.part.length
    return _seen_sizes(z.shape[:-1], columns, x.shape[-1])


def _seen_sizes(leading: Sequence[Any], columns: Any, depth: Any) -> tuple[int, int, int]:
    """M, N and K; of symbols in the call that is traced, and 0 where that is not known."""
    *rows, n, k = (seen_size(size) or 0 for size in (*leading, columns, depth))
    return math.prod(rows), n, k


_NO_GRAPH = (
    "torch.compile makes no graph of it, as of nn.LSTM and of modules with full backward hooks; "
    "TORCH_LOGS=graph_breaks prints the reason"
)
_NO_PRODUCT = "no linear layer was found in it, and no other product of a matrix by a weight"
_TRAINS = "as it is trained, with gradients; for inference call it under torch.no_grad()"
_ON_CPU = 'on CPUs PyTorch\'s own operations run; explain_model(..., device="H200") predicts what a card would do'
_COUNTED = (
    "Counted are the products, with what is fused with them or could have been. Before is torch.compile without "
    "cutfuse: cuBLAS's product and one kernel for what follows; eager code is not predicted. A time is the longer one "
    "of the device's and the host's, and a share of the host's."
)
_UNCOUNTED = "Products without times are not predicted, and not counted."
_STEPS = (
    "A training step is of both passes; the backward pass of other rows takes time too, and is not predicted. The sums "
    "are of different products and different passes, and do not add up."
)
_FORWARD_ALONE = "forward alone"  # of trained products
_STEP_SUM = "training steps"
# Of 39 layers with gelu, in tests/test_predicted_times.py.
_LARGEST_ERROR, _ERROR_IN_16_BITS = 0.09, "7 to 9% on average of a layer in 16 bits"
PIPE_WIDTH = 100  # where nothing says how wide the output is
_MARGIN = 8  # of what is behind the verdicts
_TITLES = ("", "module", "M x N x K", "times", "before, us", "after, us", "", "fused, and why no more")
GREEN, RED, _GREY = "32", "1;31", "90"  # of terminals
_OWN_COLOURS, _LEFT_COLOURS = (GREEN, "#2da44e"), (_GREY, "#8c959f")
_COLOURS = {"fused": _OWN_COLOURS, "product": _OWN_COLOURS, "joined": _OWN_COLOURS, "left": _LEFT_COLOURS}
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
        lines.append(describe_prediction(found.device))
    if not found.graphs:
        lines.append(_NO_GRAPH)
    elif not found.products and not found.unlisted:
        lines.append(_NO_PRODUCT)
    if found.unlisted:
        lines.append(_describe_unlisted(found.unlisted))
    if found.trains:
        lines.append(_TRAINS)
    if found.precision and any(product.dtype == torch.float32 for product in found.products):
        lines.append(f'fp32 products at "{found.precision}", as torch.set_float32_matmul_precision has it')
    if (
        found.device is None
        and found.products
        and not torch.cuda.is_available()
        and not any(product.is_fused for product in found.products)
    ):
        lines.append(_ON_CPU)
    for kind, before, after in _sums(found):
        without = " (the backward pass is not predicted)" if kind == _FORWARD_ALONE else ""
        gain = 1 - after / before
        less = f"{gain:.1%} less of the products' time" if gain >= 0 else "more"
        if 0 < gain < _LARGEST_ERROR and _errors(found, kind) == {_ERROR_IN_16_BITS}:
            less += ", which is within the predictions' error"
        lines.append(f"predicted, {kind}{without}: {before:,.1f} us before (torch.compile), {after:,.1f} after: {less}")
    errors = set[str]().union(*(_errors(found, kind) for kind, _, _ in _sums(found)))
    if errors:
        lines.append(f"other operations are not counted; the predictions' error is {' and '.join(sorted(errors))}")
    return lines


def _describe_unlisted(unlisted: Mapping[str, int]) -> str:
    (first, count), *others = unlisted.items()
    calls = [f"{count} {'call' if count == 1 else 'calls'} of {first}", *(f"{n} of {name}" for name, n in others)]
    whose, are = ("their", "are") if sum(unlisted.values()) > 1 else ("its", "is")
    return f"{', '.join(calls)}, with products of {whose} own, {are} not looked into"


def _sums(found: ModelExplanation) -> list[tuple[str, float, float]]:
    """The sums before and after of each kind of times, of which a trained model has two."""
    forward = _FORWARD_ALONE if any(map(_lacks_backward, found.products)) else "forward"
    kinds = [(forward, found.before, found.after), (_STEP_SUM, found.step_before, found.step_after)]
    return [kind for kind in kinds if kind[1]]


def _errors(found: ModelExplanation, kind: str) -> set[str]:
    """What is known of the errors of the times that a sum of that kind has."""
    if kind == _STEP_SUM:
        return {"not known of training steps"}
    counted = [product for product in found.products if product.times is not None and not product.times.is_step]
    return {_ERROR_IN_16_BITS if product.dtype.itemsize == 2 else "not known in fp32" for product in counted}


def _lacks_backward(product: ProductReport) -> bool:
    """Whether a product is trained, and its forward pass alone is predicted."""
    return product.is_trained and product.times is not None and not product.times.is_step


def _notes(found: ModelExplanation) -> list[str]:
    times = [product.times for product in found.products]
    if not any(times):
        return []
    return [_COUNTED, *([] if all(times) else [_UNCOUNTED]), *([_STEPS] if len(_sums(found)) > 1 else [])]


def _size_of(product: ProductReport) -> str:
    """The sizes and the type; of a trained product also which passes its times are of."""
    size = f"{product.m} x {product.n} x {product.k} {str(product.dtype).removeprefix('torch.')}"
    if product.times is not None and product.times.is_step:
        return f"{size}, training step"
    return f"{size}, {_FORWARD_ALONE}" if _lacks_backward(product) else size


def _reason_of(product: ProductReport) -> str:
    return (f"ends at {product.ended_at}: " if product.ended_at else "") + product.reason


def _time(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _scale(rows: list[Row]) -> float:
    return max((max(row.before, row.after or 0.0) for row in rows if row.before is not None), default=0.0)


def text_of(found: ModelExplanation) -> str:
    """Text as wide as the terminal that it is printed to, up to 120 columns. A terminal has colours too."""
    is_terminal = sys.stdout.isatty()
    width = min(max(shutil.get_terminal_size().columns, 60), 120) if is_terminal else PIPE_WIDTH
    characters = bar_characters(getattr(sys.stdout, "encoding", None) or "utf-8")
    rows, bar = rows_of(found), width // 5
    scale, module = _scale(rows), width - bar - 29 - _MARGIN  # what the other columns take
    lines = [line for headline in _headlines(found) for line in textwrap.wrap(headline, width)]
    if scale:
        lines.append(f"{'':{_MARGIN}}{'':{module}} times    before   after us")
    for row in rows:
        name = row.product.module if not scale else _clipped(row.product.module, module)
        times = f"{_time(row.before):>10}{_time(row.after):>10}" if scale else ""
        line = f"{row.verdict:{_MARGIN}}{name:{module}}{f'{row.occurrences}x':>6}{times}"
        if row.before is not None and row.after is not None:
            drawn = _bar(row.before / scale * bar, row.after / scale * bar, characters)
            line += f"  {coloured(drawn, _COLOURS[row.verdict][0] if has_colours() else '')}"
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


def has_colours() -> bool:
    """Whether standard output is a terminal that shows colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str) -> str:
    """A text in a terminal's colour; as it is for an empty one."""
    return f"\033[{colour}m{text}\033[0m" if colour else text


def bar_characters(encoding: str | None) -> str:
    """Blocks where the output can show them."""
    try:
        "█░".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#."
    return "█░"


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
    times = [_time(row.before), _time(row.after)]
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
