"""The growth of a region: which nodes behind a product can be lifted into an expression of its pre-activation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from ..epilogue.expression import Expr, input, unlimited_operand
from ..epilogue.expression import operand as numbered_operand
from ..epilogue.types import type_of
from .cross_entropy import cross_entropy_of
from .lifting import Operand, StopError, check_operand, check_shape, is_row_view, lift, permutation_of
from .nodes import is_call, name_of, tensor_of
from .products import Product, find_product, other_argument, row_added_next
from .row_reductions import reduction_of
from .schedule import Schedule

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
        elif is_row_view(node) and is_first:
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
        example = tensor_of(self.product.node)
        assert example is not None
        z: Any = input(type_of(example))
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
