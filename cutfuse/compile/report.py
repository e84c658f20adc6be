"""What became of each matrix product of a model."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from ..planning.linear_plan import precision_of
from ..planning.traced import plan_traced
from . import picture
from .choice import own_arguments, times_of
from .nodes import module_of, tensor_of
from .products import Product
from .region import Region, Search, Times

_OWN = "a layer of cutfuse's own, fused already: both times are its own"


class ProductReport(NamedTuple):
    """A product `[M, K] @ [K, N]` of a model.

    module: the path of its module. m, n, k: its sizes, in the call that was traced. is_fused: a kernel of cutfuse's
    computes it, with what follows. program: what is fused, as an expression of z and the operands r0, r1 ..; "z" where
    nothing follows, empty if nothing is fused. ended_at: the operation at which the region ended. reason: why it ended
    there, or why nothing was fused. times: what is predicted, None where nothing is. is_joined: one kernel computes it
    and others of the same input.
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
    about the tensors' own device.
    """

    products: tuple[ProductReport, ...]
    graphs: int
    device: str | None = None

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


def report_own(node: fx.Node) -> ProductReport:
    """A layer of cutfuse's, or one of its drop-in modules, which the compiler keeps."""
    given = own_arguments(node)
    plan = plan_traced(given, precision_of(given))
    reason = _OWN
    if plan is not None and not plan.is_fused:
        reason = (
            f"a layer of cutfuse's own: {plan.ruled_out or 'cuBLAS and one more kernel are predicted to be faster'}"
        )
    expression = repr(given.program.expression)
    own = None if plan is None or plan.ruled_out else plan.alternatives[plan.chosen].compared
    return ProductReport(
        module=module_of(node),
        m=_number(math.prod(given.x.shape[:-1])),
        n=_number(given.weight.shape[0]),
        k=_number(given.x.shape[-1]),
        dtype=given.x.dtype,
        is_fused=plan is not None and plan.is_fused,
        program=expression if given.reduction == "none" else f"{given.reduction}({expression}, -1)",
        ended_at="",
        reason=reason,
        times=None if own is None else Times(own, own),
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
    *rows, n, k = map(_number, sizes)
    return math.prod(rows), n, k


def _number(size: Any) -> int:
    """A size; of a symbol its value in the call that is traced, and 0 where that is not known."""
    found = size if isinstance(size, int) else size.node.hint
    return found if isinstance(found, int) else 0
