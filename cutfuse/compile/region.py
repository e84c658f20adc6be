"""A region, and what became of the search for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from ..epilogue import Epilogue
from .cross_entropy import CrossEntropy
from .lifting import Operand
from .nodes import tensor_of
from .products import Product

BARE = "nothing follows that can be fused"


@dataclass(frozen=True)
class Region:
    """`reduction(epilogue(x @ weight.T + bias, *operands))`, which takes the place of the node `out`.

    cone: the nodes that the region computes besides out, in order. rows_before: the views of rows that x takes, so that
    the operands broadcast. rows_after: those that the result takes. cross_entropy: what takes the place of a reduction.
    """

    product: Product
    out: fx.Node
    cone: tuple[fx.Node, ...]
    epilogue: Epilogue
    operands: tuple[Operand, ...]
    rows_before: tuple[fx.Node, ...]
    rows_after: tuple[fx.Node, ...]
    reduction: str = "none"
    keepdim: bool = False
    cross_entropy: CrossEntropy | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it is a product, and nothing follows."""
        return self.reduction == "none" and not self.epilogue.program.instructions

    @property
    def out_dtype(self) -> torch.dtype:
        example = tensor_of(self.out)
        assert example is not None
        return example.dtype


class Comparison(NamedTuple):
    """The microseconds predicted of kernels of ours, and of what runs otherwise; reason: if ours are slower."""

    own: float
    otherwise: float
    reason: str = ""


class Times(NamedTuple):
    """The microseconds predicted of a product and what is or could be fused with it: by PyTorch's way, and after.

    They are what the choice compares: the longer one of the device's time and the host's, which launches the kernels,
    and a share of the host's.
    is_step: of a training step, forwards and backwards, where that is what is compared.
    """

    before: float
    after: float
    is_step: bool = False


@dataclass
class Search:
    """What became of one product.

    region: what was found, or None. ended_at, reason: where and why the region ends. refusals: why longer regions were
    left. refused: the first of those. error: what was raised instead.
    """

    product: Product
    module: str
    region: Region | None = None
    ended_at: str = ""
    reason: str = ""
    refusals: list[str] = field(default_factory=list)
    refused: Region | None = None
    error: Exception | None = None
