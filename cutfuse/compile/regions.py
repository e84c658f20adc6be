"""Regions: a matrix product, and what follows it up to one value that is used outside.

From each product the search walks forward and lifts every node that it can into an expression of the pre-activation z.
What broadcasts and does not depend on z is an operand; views that keep the rows are transparent. Of the nodes that were
lifted, the furthest whose inner values nothing else reads becomes the end of the region, or a reduction of its rows.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ..epilogue import Epilogue, EpilogueError
from ..epilogue.expression import Expr, input, unlimited_operand
from ..epilogue.expression import operand as numbered_operand
from ..epilogue.types import type_of
from .lifting import (
    COPIES,
    Operand,
    StopError,
    check_operand,
    check_shape,
    inverse,
    is_row_slice,
    is_row_view,
    lift,
    permutation_of,
    recognise,
    short_reason,
)
from .nodes import (
    Schedule,
    example_of,
    is_call,
    memory_of,
    module_of,
    name_of,
    tensor_of,
    why_changed,
    why_undifferentiable,
)
from .products import (
    CrossEntropy,
    Product,
    cross_entropy_of,
    feeds_cross_entropy,
    find_parts,
    find_product,
    is_row_major,
    other_argument,
    reduction_of,
    row_added_next,
    same_shape,
    softcap_of,
)

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
        return example_of(self.out).dtype


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


Judge = Callable[[Region], str]  # why a region is better left to the compiler; empty where it is not


def find_regions(graph: fx.Graph, writes: dict[Any, float], judge: Judge) -> list[Search]:
    """The products of a graph, each with its region. Regions do not overlap. writes: see `last_writes`."""
    schedule = Schedule(graph, writes)
    searches = []
    for node in graph.nodes:
        product = find_product(node)
        if product is None or node in schedule.taken:
            continue
        search = _search(product, schedule, judge)
        searches.append(search)
        if search.region is not None:
            schedule.taken.update(search.region.cone, [search.region.out])
    return searches


def _search(product: Product, schedule: Schedule, judge: Judge) -> Search:
    """What becomes of a product: of one whose columns are split, the region of the first part that has one."""
    search = Search(product, module_of(product.node))
    try:
        search = _search_from(product, schedule, judge)
        for part in [] if search.region is not None else _find_parts(product, schedule):
            found = _search_from(part, schedule, lambda region: _why_not_split(region) or judge(region))
            if found.region is not None:
                return found
            search.refusals += found.refusals
            if found.refusals:
                search.reason, search.refused = found.refusals[0], found.refused
    except Exception as error:  # an error of ours ends a region, and no compilation
        search.error = error
    return search


def _find_parts(product: Product, schedule: Schedule) -> list[Product]:
    """The parts of a product's columns, if nothing is written and no mode changes before the last of them is taken."""
    parts = find_parts(product)
    epoch = schedule.epochs[product.node]
    return parts if all(schedule.epochs[part.node] == epoch for part in parts) else []


def _why_not_split(region: Region) -> str:
    """Why a part of a product is no product of its own; empty where it is one: where it meets all the others.

    Nothing else may read those, because what takes their place lies in memory otherwise.
    """
    part = region.product.part
    assert part is not None
    covered = {*region.cone, region.out}
    operands = {operand.source for operand in region.operands}
    meets = all(node in operands and covered.issuperset(node.users) for node, _, _ in part.siblings)
    return "" if meets else BARE


def _search_from(product: Product, schedule: Schedule, judge: Judge) -> Search:
    growth = Growth(product, schedule)
    search = Search(growth.product, module_of(growth.product.part.whole if growth.product.part else growth.start))
    for end, reduced in candidates(growth):
        region = region_at(growth, end, reduced)
        if isinstance(region, str):
            growth.stops.setdefault(end if reduced is None else reduced, region)
            continue
        refusal = judge(region)
        if not refusal:
            search.region = region
            break
        search.refusals.append(refusal)
        if refusal != BARE:
            search.refused = search.refused or region
    last = growth.product.node if search.region is None else search.region.out
    search.ended_at, search.reason = describe_end(growth, last, search)
    return search


_EXPLORED_OPERANDS = 16


class Growth:
    """What was lifted behind one product, and where that stopped.

    product: with the row that is added next as its bias. lifted: the nodes, each with the views of rows, and then the
    permutations, between z and it. axes: for each of them z's dimensions in the order that they have there; empty where
    none was permuted. stops: why other nodes could not be lifted.
    """

    def __init__(self, product: Product, schedule: Schedule) -> None:
        self.schedule = schedule
        self.order, self.epochs, self.taken = schedule.order, schedule.epochs, schedule.taken
        self.start = product.node
        self.product = self._with_row(product)
        self.lifted: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.axes: dict[fx.Node, tuple[int, ...]] = {}
        self.stops: dict[fx.Node, str] = {}
        self.operands: list[Operand] = []
        self.reaches = {self.start, self.product.node}
        self._grow()

    def _with_row(self, product: Product) -> Product:
        """The product with the row that is added next as its bias."""
        user = row_added_next(product)
        if user is None or user in self.taken or self.epochs[user] != self.epochs[product.node]:
            return product
        return Product(user, product.x, product.weight, product.is_transposed, other_argument(user, product.node))

    def _grow(self) -> None:
        expressions = {self.product.node: self._first_expression(self._explored)}
        self.lifted[self.product.node] = self.axes[self.product.node] = ()
        queue: list[int] = []
        nodes: dict[int, fx.Node] = {}
        self._enqueue(self.product.node, queue, nodes)
        while queue and any(self._is_open(node) for node in nodes.values()):
            node = nodes.pop(heapq.heappop(queue))
            self.reaches.add(node)
            self._enqueue(node, queue, nodes)
            if not self._is_candidate(node):
                continue
            try:
                self._lift(node, expressions)
            except StopError as stop:
                self.stops[node] = str(stop)
            except Exception as error:  # what the language does not expect ends a region, and no compilation
                self.stops[node] = f"{type(error).__name__}: {error}".split("\n")[0]

    def _enqueue(self, node: fx.Node, queue: list[int], nodes: dict[int, fx.Node]) -> None:
        for user in node.users:
            place = self.order[user]
            if place not in nodes and user not in self.reaches:
                nodes[place] = user
                heapq.heappush(queue, place)

    def _is_open(self, node: fx.Node) -> bool:
        """Whether a node may still become a part of the region."""
        return self.epochs[node] == self.epochs[self.start] and any(i in self.lifted for i in node.all_input_nodes)

    def _is_candidate(self, node: fx.Node) -> bool:
        if not is_call(node) or node in self.taken or not any(i in self.lifted for i in node.all_input_nodes):
            return False
        if self.epochs[node] != self.epochs[self.start]:
            self.stops[node] = "a tensor is written, or a mode such as autocast changes, in between"
            return False
        if reduction_of(node) is not None or cross_entropy_of(node) is not None:
            self.stops[node] = "a reduction of rows is left to Inductor"
            return False
        if find_product(node) is not None:
            self.stops[node] = "it is the next product"
            return False
        return True

    def _lift(self, node: fx.Node, expressions: dict[fx.Node, Expr]) -> None:
        sources = [i for i in node.all_input_nodes if i in self.lifted]
        source, axes = sources[0], self.axes[sources[0]]
        is_first = bool(node.args) and node.args[0] is source
        permutation = permutation_of(node) if is_first else None
        if permutation is not None:
            permuted = tuple(axes[place] for place in permutation) if axes else permutation
            self.axes[node] = () if permuted == tuple(sorted(permuted)) else permuted
        elif is_first and (is_row_view(node) or (is_row_slice(node) and feeds_cross_entropy(node))):
            self._check_view(node, axes)
            self.axes[node] = ()
        else:
            check_shape(node, source)
            if any(self.axes[item] != axes for item in sources) or (axes and name_of(node) == "batch_norm"):
                raise StopError(f"{name_of(node)} reads the product in different orders of its dimensions")
            self.axes[node] = axes
            expressions[node] = lift(node, self._values(node, expressions, self._explored), self._explored)
            self.lifted[node] = self.lifted[source]
            return
        expressions[node] = expressions[source]
        self.lifted[node] = (*self.lifted[source], node)

    def _check_view(self, node: fx.Node, axes: tuple[int, ...]) -> None:
        if axes:
            raise StopError(f"{name_of(node)} of permuted dimensions gives other rows")
        if any(isinstance(item, fx.Node) and tensor_of(item) is not None for item in node.args[1:]):
            raise StopError(f"{name_of(node)} takes a tensor")

    def _values(
        self, node: fx.Node, expressions: dict[fx.Node, Expr], operand: Callable[[Operand], Expr]
    ) -> Callable[[fx.Node], Any]:
        """What the arguments of a node are: expressions of the region, numbers, and operands."""
        example = example_of(node)

        def value(argument: fx.Node) -> Any:
            if argument in expressions:
                return expressions[argument]
            number = argument.meta.get("example_value")
            if isinstance(number, bool | int | float):
                return number
            if argument in self.reaches:
                raise StopError(f"{argument.name} depends on the product in another way")
            check_operand(argument, example.shape, example.device)
            return operand(Operand(argument, axes=self.axes[node]))

        return value

    def _explored(self, operand: Operand) -> Expr:
        if operand not in self.operands:
            if len(self.operands) >= _EXPLORED_OPERANDS:
                raise StopError("there are too many operands")
            self.operands.append(operand)
        return unlimited_operand(self.operands.index(operand), operand.type)

    def _first_expression(self, operand: Callable[[Operand], Expr]) -> Expr:
        """z, or what addmm makes of it."""
        z: Any = input(type_of(example_of(self.product.node)))
        scaled = z if self.product.scale == 1.0 else z * self.product.scale
        if self.product.addend is None:
            return scaled  # type: ignore[no-any-return]
        source, factor = self.product.addend
        added: Any = operand(Operand(source))
        return scaled + (added if factor == 1.0 else added * factor)  # type: ignore[no-any-return]

    def expression(self, cone: Iterable[fx.Node], end: fx.Node) -> tuple[Expr, list[Operand]]:
        """The expression of a cone alone, its operands numbered from 0."""
        operands: list[Operand] = []

        def numbered(operand: Operand) -> Expr:
            if operand not in operands:
                operands.append(operand)
            return numbered_operand(operands.index(operand), operand.type)

        expressions = {self.product.node: self._first_expression(numbered)}
        for node in cone:
            if node is self.product.node:
                continue
            if self.lifted[node] and self.lifted[node][-1] is node:  # a view
                expressions[node] = expressions[node.all_input_nodes[0]]
            else:
                expressions[node] = lift(node, self._values(node, expressions, numbered), numbered)
        return expressions[end], operands


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
    if cross_entropy is not None:
        softcap = softcap_of(epilogue.program)
        if softcap is None:
            return "the logits are more than a product, a softcap and a temperature"
        cross_entropy = cross_entropy._replace(softcap=softcap[0], temperature=softcap[1])
    elif any(map(is_row_slice, growth.lifted[end])):
        return "it takes some of the rows"
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
    return example_of(views[-1] if views else growth.product.node).shape


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
    users = [user for user in _readers(growth, last) if user.op != "output"]
    if not users:
        return "", BARE if search.region is None else "nothing follows"
    if refusals:  # of what was tried last, and goes on behind the region
        return name_of(users[0]), f"a longer region is left: {refusals[-1]}"
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
