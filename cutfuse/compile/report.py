"""What became of each matrix product of a model."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import picture
from .choice import times_of
from .nodes import tensor_of
from .products import Product
from .region import Region, Search, Times


class ProductReport(NamedTuple):
    """A product `[M, K] @ [K, N]` of a model.

    module: the path of its module. m, n, k: its sizes, in the call that was traced. program: what is fused, as an
    expression of z and the operands r0, r1 ..; empty if nothing is. ended_at: the operation at which the region ended.
    reason: why it ended there, or why nothing was fused. times: what is predicted, None where nothing is. is_joined:
    one kernel computes it and others of the same input.
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


@dataclass(frozen=True)
class ModelExplanation:
    """The products of a model, in the order in which they run. Print it, `save` it, or read `products`.

    It is a table with a bar for each product's predicted time, in a terminal and in a notebook too.

    graphs: how many graphs Dynamo made of the model. device: the card that this is predicted for, None where it is
    about the tensors' own device.
    """

    products: tuple[ProductReport, ...]
    graphs: int
    device: str | None = None

    @property
    def fused(self) -> int:
        """How many products have something fused."""
        return sum(product.is_fused for product in self.products)

    @property
    def before(self) -> float:
        """The microseconds that PyTorch's way is predicted to take: the sum over the products with a prediction."""
        return sum(product.times.before for product in self.products if product.times)

    @property
    def after(self) -> float:
        """The same with cutfuse."""
        return sum(product.times.after for product in self.products if product.times)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as a page of HTML, in one file that needs no other."""
        Path(path).write_text(picture.page_of(self), encoding="utf-8")

    def __str__(self) -> str:
        return picture.text_of(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks. Its text has no colour of its own, so that it can be read on light and dark pages."""
        return picture.html_of(self)


def report(search: Search, predicts: bool) -> ProductReport:
    """What became of one product; with times if it `predicts`."""
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
        times=times_of(search) if predicts else None,
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
