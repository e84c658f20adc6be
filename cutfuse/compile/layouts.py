"""How a graph's values lie in memory: what may change where nobody can tell, and what becomes of the nodes behind.

A convolution gives `[batch, channels, positions]`. Models that go on with `[batch, positions, channels]` permute it,
and PyTorch keeps the memory's order through every sum that follows: of each block of an audio encoder, the residual and
the sum lie by columns, and no kernel that multiplies stores a result so. A copy behind the first sum, which Inductor
computes together with the sum, lays them all out by rows (row-major).

The results of joined products are columns of one matrix, and no longer matrices alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ..layer.planner import seen_size
from .lifting import COPIES, ROW_VIEWS, is_evaluated_dropout
from .nodes import (
    DROPOUTS,
    EXAMPLES,
    any_example,
    called,
    computes_elements,
    is_call,
    last_writes,
    memory_of,
    name_of,
    tensor_of,
    works_in_place,
)
from .products import find_product, is_row_major, same

_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"}
# What gives a row-major result whatever the layout of its input.
_GIVE_ROWS = {"layer_norm", "rms_norm", "linear"}


@dataclass(frozen=True)
class RowCopy:
    """A row-major copy, and the values that are row-major because of it, with what their nodes had as examples."""

    node: fx.Node
    followers: list[fx.Node]
    metas: list[dict[str, Any]]

    def undo(self) -> None:
        """Takes the copy out of its graph."""
        for follower, meta in zip(self.followers, self.metas, strict=True):
            follower.meta.update(meta)
        self.node.replace_all_uses_with(self.node.args[0])  # type: ignore[arg-type]
        self.node.graph.erase_node(self.node)


def lay_out_by_rows(graph: fx.Graph, copies: list[RowCopy]) -> None:
    """Inserts such copies, and adds them to `copies`; the examples of the values behind them are row-major then."""
    for node in list(graph.nodes):
        if not _is_sum(node) or _is_row_major(node):
            continue
        followers = _followers(node)
        if any(_adds_product(follower, {node, *followers}) for follower in followers):
            copies.append(_copy(node, followers))


def _copy(node: fx.Node, followers: list[fx.Node]) -> RowCopy:
    with node.graph.inserting_after(node):
        copy = node.graph.call_method("contiguous", (node,))
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta = dict(node.meta)
    metas = [{key: follower.meta[key] for key in EXAMPLES if key in follower.meta} for follower in followers]
    for changed in [copy, *followers]:
        _make_example_row_major(changed)
    return RowCopy(copy, followers, metas)


def _is_sum(node: fx.Node) -> bool:
    return is_call(node) and name_of(node) in _SUMS and not _writes(node)


def _writes(node: fx.Node) -> bool:
    return works_in_place(node) or node.kwargs.get("out") is not None


def _followers(first: fx.Node) -> list[fx.Node]:
    """The sums and dropouts behind a sum that are row-major as soon as it is. None of them where a change of the
    layout could be seen: where another operation or the caller reads one, or another input is not row-major."""
    followers: dict[fx.Node, None] = {}
    stack = [first]
    while stack:
        for user in stack.pop().users:
            if not _is_indifferent(user):
                return []
            if user not in followers and not _is_row_major(user):
                followers[user] = None
                stack.append(user)
    others = {node for follower in followers for node in follower.all_input_nodes}.difference(followers, [first])
    return list(followers) if all(map(_is_row_major, others)) else []


def _is_indifferent(user: fx.Node) -> bool:
    """Whether an operation gives the same whatever the layout of its input, but for the layout of a sum or dropout."""
    if not is_call(user) or _writes(user):
        return False
    name = name_of(user)
    if name in _GIVE_ROWS:
        return _is_row_major(user)
    return name in _SUMS or (name in DROPOUTS and is_evaluated_dropout(user))


def _adds_product(node: fx.Node, group: set[fx.Node]) -> bool:
    """Whether a value is the sum of one of the group and a layer."""
    return any(_is_layer(argument) for argument in node.all_input_nodes if argument not in group)


def _is_layer(node: fx.Node) -> bool:
    while find_product(node) is None:
        if name_of(node) not in COPIES | ROW_VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return True


def _is_row_major(node: fx.Node) -> bool:
    """True too of what is no tensor."""
    example = tensor_of(node)
    return example is None or is_row_major(example)


def _make_example_row_major(node: fx.Node) -> None:
    for key in EXAMPLES:
        example = node.meta.get(key)
        if example is not None:
            node.meta[key] = example.new_empty(example.shape).requires_grad_(example.requires_grad)


# They give a view where there is one, and otherwise fail or copy.
_VIEWS = {
    *("view", "reshape", "unflatten", "flatten", "transpose", "permute", "unsqueeze", "squeeze", "expand", "narrow"),
    *("select", "movedim", "swapaxes", "getitem", "__getitem__", "chunk", "split", "contiguous", "to", "float", "half"),
    *("bfloat16", "type_as"),
}
# They give a result of its own, whatever the strides of what they read.
_READERS = {
    *("scaled_dot_product_attention", "matmul", "__matmul__", "bmm", "baddbmm", "mm", "linear", "addmm", "einsum"),
    *("cat", "stack", "softmax", "layer_norm", "rms_norm", "repeat_interleave", "index_copy", "index_copy_", "sum"),
    *("mean", "dropout"),
}


def examples_behind(graph: fx.Graph, columns: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Any] | None:
    """The examples of those nodes whose layout changes with that of the products; None where the products have to stay.

    They do where something writes to a product or a view of it, as two values may then be one or two memories, where
    the caller would be given a view or other strides than before, and where a node would fail or is not known to take
    any strides.
    columns: the products, with their results as columns of a matrix.
    """
    memories = {memory_of(example) for node in columns if (example := tensor_of(node)) is not None}
    if not memories.isdisjoint(last_writes(graph)):
        return None
    changed: dict[fx.Node, Any] = dict(columns)
    for node in graph.nodes:
        if node.op == "output":
            given = [tensor_of(found) for found in node.all_input_nodes]
            is_view = any(example is not None and memory_of(example) in memories for example in given)
            if is_view or not changed.keys().isdisjoint(node.all_input_nodes):
                return None
        if node in columns or changed.keys().isdisjoint(node.all_input_nodes):
            continue
        if not (is_call(node) and (name_of(node) in _VIEWS | _READERS or computes_elements(node))):
            return None
        if _reinterprets(node):  # a trial that fails would print PyTorch's traceback
            return None
        if _has_values_of_data(any_example(node)):  # of which evaluating it again would make others
            return None
        found = _evaluated(node, changed)
        if found is None or (name_of(node) == "view" and not _is_view(found, changed.get(node.args[0]))):
            return None
        if not are_alike(found, any_example(node)):
            changed[node] = found
    return {node: example for node, example in changed.items() if node not in columns}


def _reinterprets(node: fx.Node) -> bool:
    """Whether it is the bytes of a tensor that a view is of."""
    given = (*node.args[1:], *node.kwargs.values())
    return name_of(node) == "view" and any(isinstance(value, torch.dtype) for value in given)


def _has_values_of_data(example: Any) -> bool:
    """Whether a size depends on the values of a tensor."""
    return any(isinstance(leaf, Tensor) and free_unbacked_symbols(leaf.shape) for leaf in tree_leaves(example))


def _is_view(found: Tensor, source: Any) -> bool:
    """Whether a tensor with the sizes and strides of `source` has such a view, in the call that is traced. An example
    with dimensions of size 1 may have one where no tensor does."""
    if not isinstance(source, Tensor):
        return True
    sizes, strides, wanted = (
        [seen_size(size) for size in values] for values in (source.shape, source.stride(), found.shape)
    )
    if None in (*sizes, *strides, *wanted):
        return False
    with unset_fake_temporarily(), no_python_dispatcher(), suppress(RuntimeError):
        torch.empty_strided(sizes, strides, device="meta").view(wanted)  # type: ignore[arg-type]
        return True
    return False


def _evaluated(node: fx.Node, changed: Mapping[fx.Node, Any]) -> Any:
    """What a node gives for changed inputs; None where it fails."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: changed.get(given, any_example(given)))
    with suppress(Exception):
        return called(node, args, kwargs)
    return None


def are_alike(found: Any, before: Any) -> bool:
    """Whether all tensors have the same shapes and strides, and all else is the same."""
    new, old = tree_leaves(found), tree_leaves(before)
    return len(new) == len(old) and all(map(_is_alike, new, old))


def _is_alike(found: Any, before: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(before, Tensor):
        return type(found) is type(before) and not isinstance(found, Tensor) and same(found, before)
    return found.dim() == before.dim() and all(
        map(same, (*found.shape, *found.stride()), (*before.shape, *before.stride()))
    )
