"""What the kernels that Inductor generates around a region read and write because of it.

Inductor computes what follows a product in a kernel that it generates anyway, such as that of the next norm. If the
region is fused, that kernel reads the region's result instead of the product's and of the operands, and stores less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ..layer import schema
from ..layer.planner import seen_size
from .differentiation import needs_gradient
from .lifting import COPIES, DROPOUTS, PERMUTATIONS, ROW_VIEWS, is_evaluated_dropout
from .nodes import is_call, name_of, tensor_of
from .products import SPLITS, find_product
from .region import Region

# What Inductor calls and does not generate, so that nothing is fused into it; besides, all of other libraries.
_CALLED = (
    "attention",
    "conv",
    "bmm",
    "matmul",
    "einsum",
    "linear",
    "lstm",
    "gru",
    "sort",
    "topk",
    "multinomial",
    "fft",
)
# What gives the same elements, or some of them: Inductor generates no kernel for it alone.
_PIECES = {"expand", "expand_as", "view_as", "narrow", "select", "unbind", "getitem", "__getitem__", "detach"}
_VIEWS = ROW_VIEWS | PERMUTATIONS | SPLITS | _PIECES
# What gives the same elements where the type stays.
_COPIES = COPIES | {"to", "type", "float", "half", "bfloat16"}
_BEHIND_READERS = 32  # nodes that may belong to the same kernel as the last reader of the result


def absorbed_bytes(region: Region) -> float | None:
    """The bytes of matrices that generated kernels do not move if the region is fused; below 0 if they move more.

    None if no kernel would compute what is fused: none reads the result, and none computes an operand for it alone.
    """
    computed = _computed_for(region)
    readers = {region.out: _readers(region.out)} | {source: _readers(_base(source)) for source in _matrices(region)}
    nearby = _followers(region.out, readers.values())
    of_result = readers.pop(region.out)
    near = [reader for reader in of_result if reader in nearby]
    if not near and not computed:
        return None
    # What a norm or an activation reads it keeps for its gradient.
    is_stored = len(near) < len(of_result) or needs_gradient(region.out)
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
    bases = [(source, _base(source)) for source in matrices]
    return [source for source, base in bases if _is_generated(base) and covered.issuperset(_readers(base))]


def _base(node: fx.Node) -> fx.Node:
    """What a view, or a copy of the same type, is of."""
    while _passes(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _followers(out: fx.Node, readers: Iterable[list[fx.Node]]) -> set[fx.Node]:
    """The generated nodes that a kernel which reads `out` can compute: what they read does not come from a later call.

    The search ends with the last of the readers, and soon behind the last one of `out`, which comes first.
    """
    first, *others = ({reader for reader in own if out < reader and reader.op != "output"} for own in readers)
    pending, more = set().union(first, *others), _BEHIND_READERS
    near, far = {out}, set()
    node = out.next
    while pending and more and node.op != "output":
        inputs = node.all_input_nodes
        if any(source in far for source in inputs):
            far.add(node)
        elif any(source in near for source in inputs):
            (near if _is_generated(node) or _passes(node) else far).add(node)
        pending.discard(node)
        first.discard(node)
        more -= not first
        node = node.next
    return near - {out}


def _readers(node: fx.Node) -> list[fx.Node]:
    """What computes with a value, or with views of it: not what asks for its size."""
    found = []
    for user in node.users:
        if _passes(user):  # of another argument than the first one it takes the shape
            found += _readers(user) if user.args[0] is node else []
        elif user.op == "output" or _gives_tensors(user):
            found.append(user)
    return found


def _gives_tensors(node: fx.Node) -> bool:
    example = node.meta.get("example_value", node.meta.get("val"))
    return example is None or any(isinstance(item, Tensor) for item in tree_leaves(example))


def _passes(node: fx.Node) -> bool:
    """Whether a node gives elements of its first argument as they are."""
    if not is_call(node) or not node.args:
        return False
    name = name_of(node)
    if name in _VIEWS:
        return True
    source, example = tensor_of(node.args[0]), tensor_of(node)
    if name not in _COPIES or source is None or example is None or source.dtype != example.dtype:
        return False
    return name not in DROPOUTS or is_evaluated_dropout(node)


def _is_generated(node: fx.Node) -> bool:
    """Whether Inductor generates a kernel for it."""
    if not is_call(node) or _passes(node) or find_product(node) is not None:
        return False
    name = name_of(node)
    if "." in name or "::" in name or node.target in (schema.layer, schema.layer_cross_entropy):
        return False
    return not any(part in name for part in _CALLED)


def _bytes(node: fx.Node) -> float:
    example = tensor_of(node)
    return 0.0 if example is None else float(_elements(node) * example.element_size())


def _elements(node: fx.Node) -> int:
    """How many a tensor has in the call that is traced; 0 where that is not known."""
    example = tensor_of(node)
    return 0 if example is None else math.prod(seen_size(size) or 0 for size in example.shape)
