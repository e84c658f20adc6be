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
from typing import Any

import torch
from torch import fx

from ..epilogue import Epilogue, EpilogueError
from ..epilogue.expression import Expr, input, unlimited_operand
from ..epilogue.expression import operand as numbered_operand
from ..epilogue.types import type_of
from .differentiation import why_changed, why_undifferentiable
from .lifting import Operand, StopError, check_operand, check_shape, is_row_view, lift, short_reason
from .nodes import is_call, module_of, name_of, tensor_of
from .products import Product, find_product, other_argument, row_added_next, same_shape
from .row_reductions import reduction_of

_EXPLORED_OPERANDS = 16


@dataclass(frozen=True)
class Region:
    """`reduction(epilogue(x @ weight.T + bias, *operands))`, which takes the place of the node `out`.

    cone: the nodes that the region computes besides out, in order. rows_before: the views of rows that x takes, so that
    the operands broadcast. rows_after: those that the result takes.
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

    @property
    def is_bare(self) -> bool:
        """Whether it is a product, and nothing follows."""
        return self.reduction == "none" and not self.epilogue.program.instructions

    @property
    def out_dtype(self) -> torch.dtype:
        example = tensor_of(self.out)
        assert example is not None
        return example.dtype


@dataclass
class Search:
    """What became of one product. region: what was found, or None. ended_at, reason: where and why the region ends."""

    product: Product
    module: str
    region: Region | None = None
    ended_at: str = ""
    reason: str = ""
    refusals: list[str] = field(default_factory=list)


Judge = Callable[[Region], str]  # why a region is better left to the compiler; empty where it is not


def find_regions(graph: fx.Graph, epochs: dict[fx.Node, int], writes: dict[Any, float], judge: Judge) -> list[Search]:
    """The products of a graph, each with its region. Regions do not overlap."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    taken: set[fx.Node] = set()
    searches = []
    for node in graph.nodes:
        product = find_product(node)
        if product is None or node in taken:
            continue
        search = _Growth(product, order, epochs, taken, writes).search(judge)
        searches.append(search)
        if search.region is not None:
            taken.update(search.region.cone, [search.region.out])
    return searches


class _Growth:
    """The search from one product."""

    def __init__(
        self,
        product: Product,
        order: dict[fx.Node, int],
        epochs: dict[fx.Node, int],
        taken: set[fx.Node],
        writes: dict[Any, float],
    ) -> None:
        self.order, self.epochs, self.taken, self.writes = order, epochs, taken, writes
        self.start = product.node
        self.product = self._with_row(product)
        self.lifted: dict[fx.Node, tuple[fx.Node, ...]] = {}  # with the views of rows between z and the node
        self.stops: dict[fx.Node, str] = {}
        self.operands: list[Operand] = []
        self.reaches = {self.start, self.product.node}

    def _with_row(self, product: Product) -> Product:
        """The product with the row that is added next as its bias."""
        user = row_added_next(product)
        if user is None or user in self.taken or self.epochs[user] != self.epochs[product.node]:
            return product
        return Product(user, product.x, product.weight, product.is_transposed, other_argument(user, product.node))

    def search(self, judge: Judge) -> Search:
        self._grow()
        search = Search(self.product, module_of(self.start))
        for end, reduced in self._candidates():
            region = self._region(end, reduced)
            if isinstance(region, str):
                self.stops.setdefault(end if reduced is None else reduced, region)
                continue
            refusal = judge(region)
            if not refusal:
                search.region = region
                break
            search.refusals.append(refusal)
        last = self.product.node if search.region is None else search.region.out
        search.ended_at, search.reason = self._end(last, search)
        return search

    # Which nodes can be lifted

    def _grow(self) -> None:
        expressions = {self.product.node: self._first_expression(self._explored)}
        self.lifted[self.product.node] = ()
        queue: list[tuple[int, int]] = []
        nodes: dict[int, fx.Node] = {}
        self._enqueue(self.product.node, queue, nodes)
        while queue and any(self._is_open(node) for node in nodes.values()):
            node = nodes.pop(heapq.heappop(queue)[0])
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

    def _enqueue(self, node: fx.Node, queue: list[tuple[int, int]], nodes: dict[int, fx.Node]) -> None:
        for user in node.users:
            place = self.order[user]
            if place not in nodes and user not in self.reaches:
                nodes[place] = user
                heapq.heappush(queue, (place, place))

    def _is_open(self, node: fx.Node) -> bool:
        """Whether a node may still become a part of the region."""
        return self.epochs[node] == self.epochs[self.start] and any(i in self.lifted for i in node.all_input_nodes)

    def _is_candidate(self, node: fx.Node) -> bool:
        if not is_call(node) or node in self.taken or not any(i in self.lifted for i in node.all_input_nodes):
            return False
        if self.epochs[node] != self.epochs[self.start]:
            self.stops[node] = "a tensor is written, or a mode such as autocast changes, in between"
            return False
        if reduction_of(node) is not None:
            self.stops[node] = "another value of the region is used beside the reduction"
            return False
        if find_product(node) is not None:
            self.stops[node] = "it is the next product"
            return False
        return True

    def _lift(self, node: fx.Node, expressions: dict[fx.Node, Expr]) -> None:
        source = next(i for i in node.all_input_nodes if i in self.lifted)
        if is_row_view(node) and node.args[0] is source:
            if any(isinstance(item, fx.Node) and tensor_of(item) is not None for item in node.args[1:]):
                raise StopError(f"{name_of(node)} takes a tensor")
            expressions[node] = expressions[source]
            self.lifted[node] = (*self.lifted[source], node)
            return
        check_shape(node, source)
        expressions[node] = lift(node, self._values(node, expressions, self._explored), self._explored)
        self.lifted[node] = self.lifted[source]

    def _values(
        self, node: fx.Node, expressions: dict[fx.Node, Expr], operand: Callable[[Operand], Expr]
    ) -> Callable[[fx.Node], Any]:
        """What the arguments of a node are: expressions of the region, numbers, and operands."""
        example = tensor_of(node)
        assert example is not None

        def value(argument: fx.Node) -> Any:
            if argument in expressions:
                return expressions[argument]
            number = argument.meta.get("example_value")
            if isinstance(number, bool | int | float):
                return number
            if argument in self.reaches:
                raise StopError(f"{argument.name} depends on the product in another way")
            check_operand(argument, example.shape, example.device)
            return operand(Operand(argument))

        return value

    def _explored(self, operand: Operand) -> Expr:
        if operand not in self.operands:
            if len(self.operands) >= _EXPLORED_OPERANDS:
                raise StopError("there are too many operands")
            self.operands.append(operand)
        return unlimited_operand(self.operands.index(operand), operand.type)

    def _first_expression(self, operand: Callable[[Operand], Expr]) -> Expr:
        """z, or what addmm makes of it."""
        example = tensor_of(self.product.node)
        assert example is not None
        z: Any = input(type_of(example))
        scaled = z if self.product.scale == 1.0 else z * self.product.scale
        if self.product.addend is None:
            return scaled  # type: ignore[no-any-return]
        source, factor = self.product.addend
        added: Any = operand(Operand(source))
        return scaled + (added if factor == 1.0 else added * factor)  # type: ignore[no-any-return]

    # Where a region ends

    def _candidates(self) -> Iterator[tuple[fx.Node, fx.Node | None]]:
        """Ends of regions with the reduction that follows, if one does; the furthest first, and z last."""
        for node in reversed(list(self.lifted)):
            if node is not self.product.node and is_row_view(node):
                continue  # a region ends in a value of its own; its views stay outside
            for user in node.users:
                reduced = self._reduction_value(user)
                if reduced is not None and user.args and user.args[0] is node:
                    yield node, reduced
            yield node, None

    def _reduction_value(self, user: fx.Node) -> fx.Node | None:
        """The node that gives a reduction's values: for max and min, which give indices too, the first item."""
        if self.epochs[user] != self.epochs[self.start] or user in self.taken or reduction_of(user) is None:
            return None
        if name_of(user) not in ("max", "min"):
            return user
        items = list(user.users)
        if len(items) == 1 and items[0].target is operator.getitem and items[0].args[1] == 0:
            return items[0]
        return None

    def _region(self, end: fx.Node, reduced: fx.Node | None) -> Region | str:
        """The region that ends there, or why there is none."""
        cone = self._cone(end)
        reductions = [] if reduced is None else _with_first_item(reduced)
        outside = {end, *reductions}
        for node in cone:
            if (node is not end or reduced is not None) and any(u not in cone and u not in outside for u in node.users):
                return f"{name_of(node)} is used outside of the region too"
        try:
            expression, operands = self._lift_again(cone, end)
            epilogue = Epilogue.from_expression(expression, len(operands))
        except (EpilogueError, StopError) as error:
            return short_reason(error)
        unfit = self._why_undifferentiable(end if reduced is None else reduced, operands, epilogue)
        if unfit:
            return unfit
        name, keepdim = (reduction_of(reductions[0]) if reductions else None) or ("none", False)
        before, after = self._split_views(end, cone, operands, is_reduced=bool(reductions))
        if before is None:
            return "operands belong to different views of the rows"
        covered = dict.fromkeys([self.start, *cone, *reductions])
        return Region(
            product=self.product,
            out=end if reduced is None else reduced,
            cone=tuple(node for node in covered if node is not (reduced or end)),
            epilogue=epilogue,
            operands=tuple(operands),
            rows_before=before,
            rows_after=after,
            reduction=name,
            keepdim=keepdim,
        )

    def _why_undifferentiable(self, out: fx.Node, operands: list[Operand], epilogue: Epilogue) -> str:
        inputs, sources = self.product.inputs, [operand.source for operand in operands]
        changed = why_changed(out, [*inputs, *sources], self.order[out], self.writes)
        return changed or why_undifferentiable(out, inputs, sources, epilogue.program)

    def _cone(self, end: fx.Node) -> list[fx.Node]:
        """The lifted nodes that a node is computed from, in order, with the node."""
        found, stack = set(), [end]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                if node is not self.product.node:
                    stack.extend(i for i in node.all_input_nodes if i in self.lifted)
        return sorted(found, key=self.order.__getitem__)

    def _lift_again(self, cone: Iterable[fx.Node], end: fx.Node) -> tuple[Expr, list[Operand]]:
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
            if is_row_view(node) and node.all_input_nodes[0] in expressions:
                expressions[node] = expressions[node.all_input_nodes[0]]
            else:
                expressions[node] = lift(node, self._values(node, expressions, numbered), numbered)
        return expressions[end], operands

    def _split_views(
        self, end: fx.Node, cone: list[fx.Node], operands: list[Operand], is_reduced: bool
    ) -> tuple[tuple[fx.Node, ...] | None, tuple[fx.Node, ...]]:
        """The views of rows up to the one at which the operands are read, and those that follow it."""
        views = self.lifted[end]
        matrices = {operand.source for operand in operands if operand.is_matrix}
        readers = [node for node in cone if not matrices.isdisjoint(node.all_input_nodes) and node in self.lifted]
        if self.product.addend is not None and self.product.addend[0] in matrices:
            readers.append(self.product.node)
        levels = [self.lifted[node] for node in readers]
        first = levels[0] if levels else (views if is_reduced else ())
        shape = self._level_shape(first)
        if not all(same_shape(self._level_shape(level), shape) for level in levels):
            return None, ()
        if first != views[: len(first)]:  # another way to the same shape
            prefixes = [views[:count] for count in range(len(views) + 1)]
            fitting = [prefix for prefix in prefixes if same_shape(self._level_shape(prefix), shape)]
            if not fitting:
                return None, ()
            first = fitting[0]
        if is_reduced and first != views:
            return None, ()
        return first, views[len(first) :]

    def _level_shape(self, views: tuple[fx.Node, ...]) -> torch.Size:
        example = tensor_of(views[-1] if views else self.product.node)
        assert example is not None
        return example.shape

    def _end(self, last: fx.Node, search: Search) -> tuple[str, str]:
        """What follows the region, and why that is not a part of it."""
        if search.refusals and search.region is None:
            return "", search.refusals[0]
        for user in _through_views(last):
            if user.op == "output":
                continue
            if user in self.stops:
                return name_of(user), self.stops[user]
            if user in self.taken:
                return name_of(user), "it is a part of another region"
        if search.refusals:
            return "", search.refusals[0]
        users = [user for user in _through_views(last) if user.op != "output"]
        if not users:
            return "", "nothing follows"
        reason = "a region ends with its reduction" if search.region and search.region.reduction != "none" else ""
        return name_of(users[0]), reason or self.stops.get(last, "it is not elementwise, or computes with other values")


def _with_first_item(reduced: fx.Node) -> list[fx.Node]:
    """A reduction, and of one that gives indices too also the node that takes its values."""
    first = reduced.args[0]
    return [first, reduced] if reduced.target is operator.getitem and isinstance(first, fx.Node) else [reduced]


def _through_views(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a value, and of views of its rows."""
    for user in node.users:
        if is_call(user) and is_row_view(user):
            yield from _through_views(user)
        else:
            yield user
