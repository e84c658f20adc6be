"""Lays out the values that layers are added to by rows, where nobody can tell.

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
from .products import find_product, same

_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"}
# What reads rows, and gives a result by rows whatever the layout of its input.
_READERS = {"layer_norm", "rms_norm", "linear"}
_EXAMPLES = ("example_value", "val")


@dataclass(frozen=True)
class RowCopy:
    """A copy by rows, and the values that lie by rows because of it, with what their nodes had as examples."""

    node: fx.Node
    followers: list[fx.Node]
    metas: list[dict[str, Any]]

    def undo(self) -> None:
        """Takes the copy out of its graph."""
        for follower, meta in zip(self.followers, self.metas, strict=True):
            follower.meta.update(meta)
        self.node.replace_all_uses_with(self.node.args[0])  # type: ignore[arg-type]
        self.node.graph.erase_node(self.node)


def lay_out_by_rows(graph: fx.Graph) -> list[RowCopy]:
    """Inserts such copies; the examples of the values behind them lie by rows then too."""
    copies: list[RowCopy] = []
    done: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node in done or not _is_sum(node) or _lies_by_rows(node):
            continue
        followers = _followers(node)
        if followers is None or not any(_adds_product(follower, {node, *followers}) for follower in followers):
            continue
        copies.append(_copy(node, followers))
        done.update(followers)
    return copies


def _copy(node: fx.Node, followers: list[fx.Node]) -> RowCopy:
    with node.graph.inserting_after(node):
        copy = node.graph.call_method("contiguous", (node,))
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta = dict(node.meta)
    metas = [{key: follower.meta[key] for key in _EXAMPLES if key in follower.meta} for follower in followers]
    for turned in [copy, *followers]:
        _turn(turned)
    return RowCopy(copy, followers, metas)


def _is_sum(node: fx.Node) -> bool:
    return is_call(node) and name_of(node) in _SUMS and not works_in_place(node) and node.kwargs.get("out") is None


def _followers(first: fx.Node) -> list[fx.Node] | None:
    """The values that have the layout of a sum because it has it; None where one of them is seen otherwise than by what
    reads rows, or where another matrix that lies otherwise takes part."""
    found: list[fx.Node] = []
    stack = [first]
    while stack:
        for user in stack.pop().users:
            if not is_call(user) or works_in_place(user) or user.kwargs.get("out") is not None:
                return None
            if name_of(user) in _READERS and _lies_by_rows(user):
                continue
            if not (name_of(user) in _SUMS or (name_of(user) in DROPOUTS and is_evaluated_dropout(user))):
                return None
            if user not in found and not _lies_by_rows(user):
                found.append(user)
                stack.append(user)
    others = [argument for node in found for argument in node.all_input_nodes if argument not in {first, *found}]
    return found if all(map(_lies_by_rows, others)) else None


def _adds_product(node: fx.Node, group: set[fx.Node]) -> bool:
    """Whether a value is the sum of one of the group and a layer."""
    return any(_is_layer(argument) for argument in node.all_input_nodes if argument not in group)


def _is_layer(node: fx.Node) -> bool:
    while find_product(node) is None:
        if name_of(node) not in COPIES | ROW_VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return True


def _lies_by_rows(node: fx.Node) -> bool:
    """True too of what is no tensor, or too small to lie otherwise."""
    example = tensor_of(node)
    if example is None:
        return True
    stride = 1
    for size, actual in zip(reversed(example.shape), reversed(example.stride()), strict=True):
        if not (same(size, 1) or same(actual, stride)):
            return False
        stride = stride * size
    return True


def _turn(node: fx.Node) -> None:
    """Gives a value an example that lies by rows."""
    for key in _EXAMPLES:
        example = node.meta.get(key)
        if example is not None:
            node.meta[key] = example.new_empty(example.shape).requires_grad_(example.requires_grad)
