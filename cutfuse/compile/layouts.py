"""Lays out row by row (row-major) the values that layers are added to, where nobody can tell.

A convolution gives `[batch, channels, positions]`. Models that go on with `[batch, positions, channels]` permute it,
and PyTorch keeps the memory's order through every sum that follows: of each block of an audio encoder, the residual and
the sum lie by columns, and no kernel that multiplies stores a result so. A copy behind the first sum, which Inductor
computes together with the sum, lays them all out by rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from .lifting import COPIES, DROPOUTS, ROW_VIEWS, is_evaluated_dropout
from .nodes import is_call, name_of, tensor_of, works_in_place
from .products import find_product, is_row_major

_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"}
# What gives a row-major result whatever the layout of its input.
_READERS = {"layer_norm", "rms_norm", "linear"}
_EXAMPLES = ("example_value", "val")


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
    metas = [{key: follower.meta[key] for key in _EXAMPLES if key in follower.meta} for follower in followers]
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
    if name in _READERS:
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
    for key in _EXAMPLES:
        example = node.meta.get(key)
        if example is not None:
            node.meta[key] = example.new_empty(example.shape).requires_grad_(example.requires_grad)
