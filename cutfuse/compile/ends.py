"""Where a region ends: at the furthest value, or reduction of one, whose inner values nothing else reads."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from ..epilogue import Epilogue, EpilogueError
from .cross_entropy import cross_entropy_of
from .differentiation import memory_of, why_changed, why_undifferentiable
from .growth import Growth
from .lifting import COPIES, Operand, StopError, inverse, is_row_view, permutation_of, short_reason
from .nodes import is_call, name_of, tensor_of
from .products import is_row_major, same_shape
from .region import BARE, Region, Search
from .row_reductions import reduction_of
from .written_out import recognise


def candidates(growth: Growth) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """Ends of regions with the reduction that follows, if one does; the furthest first, and z last."""
    for node in reversed(list(growth.lifted)):
        for user in node.users if not growth.axes[node] else ():
            reduced = _reduction_value(growth, user)
            if reduced is not None and user.args and user.args[0] is node:
                yield node, reduced
        if node not in growth.lifted[node]:  # a region ends in a value of its own; its views stay outside
            yield node, None


def _reduction_value(growth: Growth, user: fx.Node) -> fx.Node | None:
    """The node that gives a reduction's values: for max and min, which give indices too, the first item."""
    if growth.epochs[user] != growth.epochs[growth.start] or user in growth.taken or _reduced_by(user) is None:
        return None
    if name_of(user) not in ("max", "min"):
        return user
    items = list(user.users)
    if len(items) == 1 and items[0].target is operator.getitem and items[0].args[1] == 0:
        return items[0]
    return None


def _reduced_by(node: fx.Node) -> tuple[str, bool] | None:
    """The reduction of rows that a node computes, or of which it is made, and whether it keeps the dimension."""
    return ("logsumexp", False) if cross_entropy_of(node) is not None else reduction_of(node)


def region_at(growth: Growth, end: fx.Node, reduced: fx.Node | None) -> Region | str:
    """The region that ends there, or why there is none."""
    cone = _cone(growth, end)
    reductions = [] if reduced is None else _with_first_item(reduced)
    outside = {end, *reductions}
    for node in cone:
        if (node is not end or reduced is not None) and any(u not in cone and u not in outside for u in node.users):
            return f"{name_of(node)} is used outside of the region too"
    try:
        expression, operands = growth.expression(cone, end)
        epilogue = Epilogue.from_expression(recognise(expression), len(operands))
    except (EpilogueError, StopError) as error:
        return short_reason(error)
    out = end if reduced is None else reduced
    unfit = _why_undifferentiable(growth, out, operands, epilogue)
    if unfit:
        return unfit
    axes = growth.axes[end]
    if axes and _is_written(growth, out):
        return "its result, which would be a view, is written to"
    if not _is_row_major(out, axes):
        return "PyTorch lays out the result otherwise than by rows"
    name, keepdim = (_reduced_by(reductions[0]) if reductions else None) or ("none", False)
    cross_entropy = cross_entropy_of(reductions[0]) if reductions else None
    if cross_entropy is not None and epilogue.program.instructions:
        return "the logits are more than a product"
    before, after = _split_views(growth, end, cone, operands, is_reduced=bool(reductions))
    if before is None:
        return "operands belong to different views of the rows"
    covered = dict.fromkeys([growth.start, *cone, *reductions])
    return Region(
        product=growth.product,
        out=out,
        cone=tuple(node for node in covered if node is not out),
        epilogue=epilogue,
        operands=tuple(operands),
        rows_before=before,
        rows_after=after,
        reduction=name,
        keepdim=keepdim,
        cross_entropy=cross_entropy,
    )


def _why_undifferentiable(growth: Growth, out: fx.Node, operands: list[Operand], epilogue: Epilogue) -> str:
    inputs, sources = growth.product.inputs, [operand.source for operand in operands]
    changed = why_changed(out, [*inputs, *sources], growth.order[out], growth.schedule.writes)
    return changed or why_undifferentiable(out, inputs, sources, epilogue.program)


def _cone(growth: Growth, end: fx.Node) -> list[fx.Node]:
    """The lifted nodes that a node is computed from, in order, with the node."""
    found, stack = set(), [end]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node is not growth.product.node:
                stack.extend(i for i in node.all_input_nodes if i in growth.lifted)
    return sorted(found, key=growth.order.__getitem__)


def _split_views(
    growth: Growth, end: fx.Node, cone: list[fx.Node], operands: list[Operand], is_reduced: bool
) -> tuple[tuple[fx.Node, ...] | None, tuple[fx.Node, ...]]:
    """The views of rows up to the one at which the operands are read, and those that follow it."""
    views = growth.lifted[end]
    matrices = {operand.source for operand in operands if operand.is_matrix}
    readers = [node for node in cone if not matrices.isdisjoint(node.all_input_nodes) and node in growth.lifted]
    if growth.product.addend is not None and growth.product.addend[0] in matrices:
        readers.append(growth.product.node)
    rows = _views_of_rows(views)
    levels = [_views_of_rows(growth.lifted[node]) for node in readers]
    first = levels[0] if levels else (rows if is_reduced else ())
    shape = _level_shape(growth, first)
    if not all(same_shape(_level_shape(growth, level), shape) for level in levels):
        return None, ()
    if first != rows[: len(first)]:  # another way to the same shape
        prefixes = [rows[:count] for count in range(len(rows) + 1)]
        fitting = [prefix for prefix in prefixes if same_shape(_level_shape(growth, prefix), shape)]
        if not fitting:
            return None, ()
        first = fitting[0]
    if is_reduced and first != rows:
        return None, ()
    return first, (*rows[len(first) :], *_permutations(growth, end))


def _permutations(growth: Growth, end: fx.Node) -> tuple[fx.Node, ...]:
    """Those behind all views of rows; none where they undo each other, as those before a view do."""
    if not growth.axes[end]:
        return ()
    views = growth.lifted[end]
    count = next((k for k, view in enumerate(reversed(views)) if permutation_of(view) is None), len(views))
    return views[len(views) - count :]


def _views_of_rows(views: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """Those that are no permutations."""
    return tuple(view for view in views if permutation_of(view) is None)


def _level_shape(growth: Growth, views: tuple[fx.Node, ...]) -> torch.Size:
    example = tensor_of(views[-1] if views else growth.product.node)
    assert example is not None
    return example.shape


def describe_end(growth: Growth, last: fx.Node, search: Search) -> tuple[str, str]:
    """What follows the region, and why that is not a part of it."""
    refusals = [refusal for refusal in search.refusals if refusal != BARE]
    if refusals and search.region is None:
        return "", refusals[0]
    for user in _readers(growth, last):
        if user.op == "output":
            continue
        if user in growth.stops:
            return name_of(user), growth.stops[user]
        if user in growth.taken:
            return name_of(user), "it is a part of another region"
    if refusals:
        return "", refusals[0]
    users = [user for user in _readers(growth, last) if user.op != "output"]
    if not users:
        return "", BARE if search.region is None else "nothing follows"
    reason = "a region ends with its reduction" if search.region and search.region.reduction != "none" else ""
    return name_of(users[0]), reason or growth.stops.get(last, "it is not elementwise, or computes with other values")


def _with_first_item(reduced: fx.Node) -> list[fx.Node]:
    """A reduction, and of one that gives indices too also the node that takes its values."""
    first = reduced.args[0]
    return [first, reduced] if reduced.target is operator.getitem and isinstance(first, fx.Node) else [reduced]


def _readers(growth: Growth, node: fx.Node) -> Iterator[fx.Node]:
    """The users of a value, of views of its rows, and of copies such as a dropout's in evaluation."""
    for user in node.users:
        is_copy = user in growth.lifted and (name_of(user) in COPIES or user in growth.lifted[user])
        if is_call(user) and (is_row_view(user) or is_copy):
            yield from _readers(growth, user)
        else:
            yield user


def _is_written(growth: Growth, node: fx.Node) -> bool:
    example = tensor_of(node)
    return example is not None and memory_of(example) in growth.schedule.writes


def _is_row_major(node: fx.Node, axes: tuple[int, ...]) -> bool:
    """Whether a result is laid out as kernels store one: by the product's rows, without gaps."""
    example = tensor_of(node)
    return example is not None and is_row_major(example, inverse(axes) if axes else None)
