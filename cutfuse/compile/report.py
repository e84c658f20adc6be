"""What became of each matrix product of a model."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .nodes import tensor_of
from .products import Product
from .region import Region, Search

_WIDTH = 120
_NO_GRAPH = (
    "torch.compile makes no graph of it, as of nn.LSTM and of modules with full backward hooks; "
    "TORCH_LOGS=graph_breaks prints the reason"
)
_HTML_TITLES = ("module", "times", "M x N x K", "fused", "ends at", "because")


class ProductReport(NamedTuple):
    """A product `[M, K] @ [K, N]` of a model.

    module: the path of its module. m, n, k: its sizes, in the call that was traced. program: what is fused, as an
    expression of z and the operands r0, r1 ..; empty if nothing is. ended_at: the operation at which the region ended.
    reason: why it ended there, or why nothing was fused.
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


@dataclass(frozen=True)
class ModelExplanation:
    """The products of a model, in the order in which they run. Print it, or read `products`.

    graphs: how many graphs Dynamo made of the model.
    """

    products: tuple[ProductReport, ...]
    graphs: int

    @property
    def fused(self) -> int:
        """How many products have something fused."""
        return sum(product.is_fused for product in self.products)

    def __str__(self) -> str:
        graphs = f"{self.graphs} graph{'s' if self.graphs != 1 else ''}"
        lines = [f"{self.fused} of {len(self.products)} products are fused, in {graphs}"]
        if not self.graphs:
            lines.append(_NO_GRAPH)
        for count, product in _grouped(self.products):
            lines += _described(count, product)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks. It has no colour of its own, so that it can be read on light and dark pages."""
        first, *_ = str(self).splitlines()
        rows = "".join(_html_row(count, product) for count, product in _grouped(self.products))
        head = "".join(f"<th>{title}</th>" for title in _HTML_TITLES)
        caption = f'<caption style="text-align: left; font-weight: bold">{html.escape(first)}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _grouped(products: Sequence[ProductReport]) -> list[tuple[int, ProductReport]]:
    """Products that differ in the numbers of their modules alone, as those of equal layers do, counted once."""
    groups: dict[Any, list[ProductReport]] = {}
    for product in products:
        key = product._replace(module=".".join(part for part in product.module.split(".") if not part.isdigit()))
        groups.setdefault(key, []).append(product)
    return [(len(found), found[0]) for found in groups.values()]


def _html_row(count: int, product: ProductReport) -> str:
    sizes = f"{product.m} x {product.n} x {product.k} {str(product.dtype).removeprefix('torch.')}"
    cells = (product.module, str(count), sizes, product.program, product.ended_at, product.reason)
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _described(count: int, product: ProductReport) -> list[str]:
    sizes = f"{product.m} x {product.n} x {product.k} {str(product.dtype).removeprefix('torch.')}"
    verdict, times = "fused" if product.is_fused else "left", f"  {count} times" if count > 1 else ""
    lines = [f"{verdict:8}{product.module}  {sizes}{times}"]
    if product.program:
        lines.append(f"          {product.program}")
    ended = f"ends at {product.ended_at}: " if product.ended_at else ""
    lines += textwrap.wrap(ended + product.reason, _WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 12)
    return lines


def report(search: Search) -> ProductReport:
    """What became of one product."""
    region = search.region
    m, n, k = _sizes(search.product)
    z = tensor_of(search.product.node)
    assert z is not None
    return ProductReport(
        module=search.module,
        m=m,
        n=n,
        k=k,
        dtype=z.dtype,
        is_fused=region is not None,
        program="" if region is None else _expression(region),
        ended_at=search.ended_at,
        reason=search.reason,
    )


def _expression(region: Region) -> str:
    expression = repr(region.epilogue.expression)
    if region.cross_entropy is not None:
        return f"cross_entropy({expression}, target)"
    return expression if region.reduction == "none" else f"{region.reduction}({expression}, -1)"


def _sizes(product: Product) -> tuple[int, int, int]:
    z, x = tensor_of(product.node), tensor_of(product.x)
    assert z is not None
    assert x is not None
    columns = z.shape[-1] if product.part is None else product.part.length
    sizes = [*z.shape[:-1], columns, x.shape[-1]]
    *rows, n, k = (size if isinstance(size, int) else _hint(size) for size in sizes)
    return math.prod(rows), n, k


def _hint(size: Any) -> int:
    """A symbol's value in the call that is traced; 0 where that is not known."""
    found = size.node.hint
    return found if isinstance(found, int) else 0
