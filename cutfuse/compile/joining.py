"""Joins products of one x with several weights, as queries, keys and values have them, into one kernel.

Where each of them is small, one kernel for all fills the device that each leaves idle, and the host issues one launch
instead of three. The results are columns of one matrix: views with a larger row stride, which the nodes behind them
have to take.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from .. import native
from ..arguments import is_wrapper
from ..layer import schema
from ..layer.planner import MOST_WEIGHTS, plan_traced_joined
from .layouts import examples_behind
from .nodes import example_of, find_epochs, module_of, name_of, needs_gradient, set_example, tensor_of
from .products import Product, find_product, same
from .regions import Times
from .rewriting import Emit, emitting, fake_mode_of

# By how much one kernel has to be predicted faster: large products have little to gain, and lose some where a card at
# its power limit runs cuBLAS's larger tiles better.
_ADVANTAGE = 0.95


class Together(NamedTuple):
    """What is reported of products that are joined. times: None where they are joined without a prediction."""

    reason: str
    times: Times | None = None

    def share(self, columns: int, of: int) -> Together:
        """The same of one product, with its share of the columns."""
        if self.times is None:
            return self
        return self._replace(times=Times(self.times.before * columns / of, self.times.after * columns / of))


def join_products(graph: fx.Graph, warn: Callable[[Exception], None]) -> dict[fx.Node, Together]:
    """Joins products that are left in a graph; for each node that it replaced, what to report.

    warn: called with an error, which leaves a group as it was.
    """
    reported: dict[fx.Node, Together] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    for found in list(_groups(graph)):
        try:
            group = [_current(product, replaced) for product in found]
            together = _why_together(group)
            columns = [int(example_of(product.weight).shape[0]) for product in group]
            joined = {} if together is None else _join(graph, group)
        except Exception as error:
            warn(error)
            continue
        replaced.update(joined)
        if together is not None:
            shares = [together.share(own, sum(columns)) for own in columns]
            reported.update(zip(joined, shares, strict=False))
    return reported


def _join(graph: fx.Graph, group: Sequence[Product]) -> dict[fx.Node, fx.Node]:
    """Puts the operator before the first product, and views of its columns in the products' places, which it gives;
    nothing where they have to stay."""
    first = group[0].node
    with fake_mode_of(first), torch.no_grad():
        columns = _columns_of(group)
        changed = examples_behind(graph, columns)
    if changed is None:
        return {}
    with emitting(graph, first) as emit:
        parts = _emit_parts(emit, group)
    replaced = dict(zip(columns, parts, strict=True))
    for node, part in replaced.items():
        part.meta = {**node.meta}
        set_example(part, columns[node])
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    for node, example in changed.items():
        set_example(node, example)
    return replaced


def _groups(graph: fx.Graph) -> Iterator[list[Product]]:
    """Products of one x with nothing between them that has to keep its place, two or more."""
    epochs = find_epochs(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    found: dict[tuple[fx.Node, int], list[Product]] = {}
    for node in graph.nodes:
        product = find_product(node)
        if product is not None and _is_joinable(product):
            found.setdefault((product.x, epochs[node]), []).append(product)
    for products in found.values():
        first = order[products[0].node]
        known = [p for p in products if all(order[given] < first for given in p.inputs)]
        for start in range(0, len(known), MOST_WEIGHTS):
            if len(group := known[start : start + MOST_WEIGHTS]) > 1:
                yield group


def _current(product: Product, replaced: Mapping[fx.Node, fx.Node]) -> Product:
    """A product whose inputs may have been joined themselves."""
    x, weight, bias = (
        None if node is None else replaced.get(node, node) for node in (product.x, product.weight, product.bias)
    )
    assert x is not None
    assert weight is not None
    return replace(product, x=x, weight=weight, bias=bias)


def _is_joinable(product: Product) -> bool:
    """Whether a product could be joined with others: a layer of 16 bits that nothing differentiates."""
    if name_of(product.node) != "linear" or product.is_transposed or not product.is_plain or not product.node.users:
        return False
    examples = [tensor_of(node) for node in (product.node, *product.inputs)]
    given = [example for example in examples if example is not None]
    if len(given) < len(examples) or any(is_wrapper(type(example)) for example in given):
        return False
    y, x, weight, *biases = given
    return (
        all(example.dtype == y.dtype and example.device == y.device for example in given)
        and (y.dtype.itemsize == 2 or native.operators_everywhere)
        and not needs_gradient(product.node)
        and weight.dim() == 2
        and all(is_concrete_int(size) and size > 0 for size in weight.shape)
        and x.dim() > 1
        and all(bias.dim() == 1 and same(bias.shape[0], weight.shape[0]) for bias in biases)
    )


def _why_together(group: Sequence[Product]) -> Together | None:
    """What is reported of products that are joined; None where they are not to be."""
    together = f"one kernel multiplies its input by the weights of {_names_of(group)}"
    if native.operators_everywhere:
        return Together(together)
    x, weights = example_of(group[0].x), [example_of(product.weight) for product in group]
    plan = plan_traced_joined(x, weights, [tensor_of(product.bias) for product in group])
    if plan is None or not plan.is_fused:
        return None
    best, apart = plan.alternatives[plan.chosen].compared, plan.alternatives[-1].compared
    if best > _ADVANTAGE * apart:
        return None
    reason = f"{together}, and is predicted to take {best:.1f} us, cuBLAS's products {apart:.1f} us"
    return Together(reason, Times(apart, best))


def _names_of(group: Sequence[Product]) -> str:
    """The last part of each layer's path; of a layer without a module, its weight's name."""
    *names, last = [module_of(product.node).rpartition(".")[2] or product.weight.name for product in group]
    return f"{', '.join(names)} and {last}"


def _columns_of(group: Sequence[Product]) -> dict[fx.Node, Tensor]:
    """What the products would give as columns of one matrix."""
    x = example_of(group[0].x)
    columns = [int(example_of(product.weight).shape[0]) for product in group]
    joined = x.new_empty((math.prod(x.shape[:-1]), sum(columns)))
    parts = torch.split(joined, columns, 1)
    leading = x.shape[:-1]
    return {
        product.node: part if x.dim() == 2 else part.unflatten(0, leading)
        for product, part in zip(group, parts, strict=True)
    }


def _emit_parts(call: Emit, group: Sequence[Product]) -> list[fx.Node]:
    """The nodes that give what the products give."""
    x, weights = group[0].x, [product.weight for product in group]
    leading = example_of(x).shape[:-1]
    is_matrix = len(leading) == 1
    matrix = x if is_matrix else call("reshape", x, -1, int(example_of(x).shape[-1]))
    joined = call(schema.joined, matrix, weights, [product.bias for product in group])
    columns = call("split", joined, [int(example_of(weight).shape[0]) for weight in weights], 1)
    parts = [call(operator.getitem, columns, place) for place in range(len(group))]
    if is_matrix:
        return parts
    sizes = [int(size) if is_concrete_int(size) else call("size", x, place) for place, size in enumerate(leading)]
    return [call("unflatten", part, 0, sizes) for part in parts]
