"""What an explanation says of a model's graph before it is rewritten: products that PyTorch would refuse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..arguments import is_wrapper
from .nodes import example_of, is_call, module_of, name_of
from .products import find_product

_CASTS_NOTHING = "; torch.autocast casts nothing on the meta device, so move both to the CPU if it is to cast them"


def why_refused(graphs: Iterable[fx.Graph]) -> str:
    """Which product PyTorch would refuse on a card because its matrices have several types; empty where none has.

    No kernel runs on the meta device, so that nobody refuses it there. Elsewhere autocast may make one type of them.
    """
    nodes = [node for graph in graphs for node in graph.nodes]
    is_casting = any(is_call(node) and name_of(node) == "_enter_autocast" for node in nodes)
    for product in map(find_product, nodes):
        if product is None:
            continue
        x, weight = example_of(product.x), example_of(product.weight)
        is_meta = x.device.type == "meta"
        if x.dtype == weight.dtype or is_wrapper(type(x)) or is_wrapper(type(weight)):
            continue
        if is_meta or not (is_casting or torch.is_autocast_enabled(x.device.type)):
            return (
                f"{module_of(product.node)} multiplies an input of {x.dtype} by a weight of {weight.dtype}, which "
                f"PyTorch refuses: give the input the model's type (x.to({weight.dtype})), or the model the input's"
                f"{_CASTS_NOTHING if is_meta else ''}"
            )
    return ""
