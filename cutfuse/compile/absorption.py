"""What the kernels that Inductor generates around a region read and write because of it.

Inductor computes what follows a product in a kernel that it generates anyway, such as that of the next norm. If the
region is fused, that kernel reads the region's result instead of the product's and of the operands, and stores less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from ..ops import schema
from ..planning.traced import seen_size
from .lifting import is_row_view
from .nodes import is_call, name_of, tensor_of
from .products import find_product
from .region import Region

# What Inductor calls and does not generate, so that nothing is fused into it.
_CALLED = ("attention", "conv", "bmm", "matmul", "einsum", "linear", "lstm", "gru")
# Views that are no rows of their source; Inductor generates no kernel for them alone.
_VIEWS = ("permute", "transpose", "t", "view", "reshape", "squeeze", "unsqueeze", "expand", "narrow", "select", "chunk")


def absorbed_bytes(region: Region) -> float | None:
    """The bytes of matrices that generated kernels do not move if the region is fused; below 0 if they move more.

    None if no kernel would compute what is fused: none reads the result, and none computes an operand for it alone.
    """
    computed = _computed_for(region)
    readers = {source: _readers(source) for source in (region.out, *_matrices(region))}
    nearby = _followers(region.out, readers.values())
    near = [reader for reader in readers[region.out] if reader in nearby]
    if not near and not computed:
        return None
    # What a norm or an activation reads it keeps for its gradient.
    is_stored = len(near) < len(readers.pop(region.out)) or _is_trained(region.out)
    read = [source for source, own in readers.items() if source not in computed and nearby.isdisjoint(own)]
    moved = _bytes(region.product.node) + sum(map(_bytes, read)) - sum(map(_bytes, computed))
    return moved + _bytes(region.out) * (is_stored - bool(near))


def _matrices(region: Region) -> list[fx.Node]:
    """The operands that are full matrices."""
    count = _elements(region.out)
    return [operand.source for operand in region.operands if operand.is_matrix and _elements(operand.source) == count]


def _computed_for(region: Region) -> list[fx.Node]:
    """The matrices that a generated kernel computes and nothing but the region reads, so that nothing stores them."""
    covered = {*region.cone, region.out}
    matrices = [operand.source for operand in region.operands if operand.is_matrix]
    return [source for source in matrices if _is_generated(source) and covered.issuperset(_readers(source))]


def _followers(out: fx.Node, readers: Iterable[list[fx.Node]]) -> set[fx.Node]:
    """The generated nodes that a kernel which reads `out` can compute: what they read does not come from a later call.

    The search ends behind the last of the readers.
    """
    pending = {reader for own in readers for reader in own if out < reader}
    near, far = {out}, set()
    node = out.next
    while pending and node.op != "output":
        inputs = node.all_input_nodes
        if any(source in far for source in inputs):
            far.add(node)
        elif any(source in near for source in inputs):
            (near if _is_generated(node) or _is_view(node) else far).add(node)
        pending.discard(node)
        node = node.next
    return near - {out}


def _readers(node: fx.Node) -> list[fx.Node]:
    """The users of a value, and of views of it."""
    found = []
    for user in node.users:
        found += _readers(user) if _is_view(user) else [user]
    return found


def _is_view(node: fx.Node) -> bool:
    return is_call(node) and (is_row_view(node) or name_of(node) in _VIEWS)


def _is_generated(node: fx.Node) -> bool:
    if not is_call(node) or find_product(node) is not None or node.target in (schema.layer, schema.layer_cross_entropy):
        return False
    return not any(part in name_of(node) for part in _CALLED)


def _is_trained(node: fx.Node) -> bool:
    example = tensor_of(node)
    return example is not None and example.requires_grad


def _bytes(node: fx.Node) -> float:
    example = tensor_of(node)
    return 0.0 if example is None else float(_elements(node) * example.element_size())


def _elements(node: fx.Node) -> int:
    """How many a tensor has in the call that is traced; 0 where that is not known."""
    example = tensor_of(node)
    return 0 if example is None else math.prod(seen_size(size) or 0 for size in example.shape)
