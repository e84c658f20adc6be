"""From an expression to a program: order of evaluation, slots, immediates, and the limits; and to its affine form.

An epilogue may be affine in the pre-activation: slope * z + intercept. A sum or mean of such a one over the columns
needs no matrix product. Nothing else decides this: the kernels' `find_scaling` looks for a program that is a product,
and `prepare` folds an instruction with a number into another.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import torch

from cutfuse.epilogue.errors import EpilogueError, counted
from cutfuse.epilogue.expression import Expr, apply, to_expression, topological
from cutfuse.epilogue.program import Argument, Instruction, Program, assign_immediates
from cutfuse.epilogue.table import Op, op_table

# Orders tried where the first one needs more slots than there are. Each takes some 50 us.
_ATTEMPTS = 200

_ADVICE = "compute a part of it before or after with cutfuse.pointwise, or pass a part as an operand"


class _Node:
    """An instruction to be: `arguments` has the indices of other nodes, names of leaves and numbers.

    inner: the nodes among the arguments, each once. kept: the one that has to be in a slot, argument c.
    """

    def __init__(self, op: Op, arguments: list[int | Argument], parameters: tuple[float, ...]) -> None:
        self.op = op
        self.arguments = arguments
        self.parameters = parameters
        self.inner = list(dict.fromkeys([item for item in arguments if isinstance(item, int)]))
        last = arguments[-1]
        self.kept = last if len(arguments) == 3 and isinstance(last, int) else None


def lower(root: Expr, operand_count: int, is_eager: bool = False) -> Program:
    """The program of an expression. Raises EpilogueError, naming the limit, where it does not fit.

    is_eager: as of a Program.
    """
    table = op_table()
    if operand_count > table.limits["operands"]:
        raise EpilogueError(
            f"{operand_count} tensor operands exceed the limit of {table.limits['operands']}: {_ADVICE}"
        )
    read = count_operands_read(root)
    if read > operand_count:
        raise EpilogueError(
            f"the epilogue reads operand {read - 1}, and is given {counted(operand_count, 'operand')}: {root!r}"
        )
    nodes, result = _flatten(root)
    return Program(_assemble(nodes, *_schedule(nodes, result)), operand_count, is_eager)


def check_length(root: Expr) -> None:
    """Raises EpilogueError where an expression takes more instructions than a program has."""
    _flatten(root)


def count_operands_read(root: Expr) -> int:
    """One more than the largest number of an operand that the expression reads."""
    return max((int(leaf[1:]) + 1 for leaf in root.reads if leaf != "z"), default=0)


def _flatten(root: Expr) -> tuple[list[_Node], int | Argument]:
    """The nodes that compute root, arguments first, and what root itself is. Copies that only mark a type go.

    Raises EpilogueError where they are more instructions than a program has.
    """
    identity = op_table().identity
    nodes: list[_Node] = []
    known: dict[tuple[int | str, ...], int] = {}
    places: dict[int, int | Argument] = {}

    def add(op: Op, arguments: list[int | Argument], parameters: tuple[float, ...] = ()) -> int:
        # repr tells -0.0 from 0.0
        key: tuple[int | str, ...] = (op.code, *map(repr, arguments), *map(repr, parameters))
        if key not in known:
            known[key] = len(nodes)
            nodes.append(_Node(op, arguments, parameters))
        return known[key]

    for item in topological(root):
        if item.op is None:
            places[id(item)] = item.leaf if item.number is None else item.number
        elif item.op is identity:
            places[id(item)] = places[id(item.arguments[0])]
        else:
            arguments = [places[id(argument)] for argument in item.arguments]
            for k in _misfits(item.op, arguments):
                arguments[k] = add(identity, [arguments[k]])
            places[id(item)] = add(item.op, arguments, item.parameters)
    result = places[id(root)]
    if not isinstance(result, int) and result != "z":
        result = add(identity, [result])
    limit = op_table().limits["instructions"]
    if len(nodes) > limit:
        raise EpilogueError(
            f"the epilogue takes {len(nodes)} instructions, and a program has at most {limit}: {_ADVICE}"
        )
    return nodes, result


def _misfits(op: Op, arguments: list[int | Argument]) -> list[int]:
    """Places of leaves that an instruction cannot take where they stand, so that they have to be copied first.

    Those are z or an operand as argument c, and numbers beyond the immediates that are free.
    """
    misfits = [2] if len(arguments) == 3 and isinstance(arguments[2], str) else []
    numbers = [k for k, argument in enumerate(arguments) if isinstance(argument, float)]
    while numbers:
        try:
            assign_immediates(op, [arguments[k] if k in numbers else "" for k in range(len(arguments))])
            break
        except EpilogueError:
            misfits.append(numbers.pop(0))
    return misfits


def _schedule(nodes: list[_Node], result: int | Argument) -> tuple[list[int], dict[int, int]]:
    """An order of evaluation that fits the slots, and the slot of each value that needs one."""
    if not isinstance(result, int):
        return [], {}
    limit = op_table().limits["slots"]
    fewest = len(nodes)
    for orders in _orders_to_try(nodes):
        order = _depth_first(result, orders)
        slots = _assign_slots(nodes, order)
        needed = 1 + max(slots.values(), default=-1)
        if needed <= limit:
            return order, slots
        fewest = min(fewest, needed)
    raise EpilogueError(
        f"the epilogue keeps {fewest} intermediate values at a time, and a program has {limit} slots: {_ADVICE}"
    )


def _orders_to_try(nodes: list[_Node]) -> Iterator[list[list[int]]]:
    """Of the arguments of each node: Sethi and Ullman's orders, and if shared values spoil these, others."""
    yield _preferred_orders(nodes)
    shuffle = random.Random(0)
    for _ in range(_ATTEMPTS):
        yield [shuffle.sample(node.inner, len(node.inner)) for node in nodes]


def _preferred_orders(nodes: list[_Node]) -> list[list[int]]:
    """For each node the order of its arguments that needs the fewest slots, as if no value were used twice."""
    needs: list[int] = []
    orders: list[list[int]] = []
    for node in nodes:
        costs = []
        for order in itertools.permutations(node.inner):
            held = cost = 0
            for item in order:
                cost = max(cost, held + needs[item])
                held += item == node.kept or item != order[-1]
            costs.append((max(cost, held), order))
        cost, order = min(costs, key=lambda entry: entry[0])
        needs.append(cost)
        orders.append(list(order))
    return orders


def _depth_first(root: int, orders: list[list[int]]) -> list[int]:
    result: list[int] = []
    done: set[int] = set()

    def visit(index: int) -> None:
        if index not in done:
            for item in orders[index]:
                visit(item)
            done.add(index)
            result.append(index)

    visit(root)
    return result


def _last_uses(nodes: list[_Node], order: list[int]) -> dict[int, int]:
    """For each node that a slot has to hold, the position of its last use."""
    position = {index: place for place, index in enumerate(order)}
    last: dict[int, int] = {}
    for place, index in enumerate(order):
        for item in nodes[index].inner:
            if position[item] != place - 1 or item == nodes[index].kept:
                last[item] = place
    return last


def _assign_slots(nodes: list[_Node], order: list[int]) -> dict[int, int]:
    """A slot for each value that outlives the next instruction. One is free again for the result of its last user."""
    last = _last_uses(nodes, order)
    slots: dict[int, int] = {}
    busy_until: list[int] = []
    for place, index in enumerate(order):
        if index not in last:
            continue
        free = next((slot for slot, until in enumerate(busy_until) if until <= place), len(busy_until))
        busy_until[free : free + 1] = [last[index]]
        slots[index] = free
    return slots


def _assemble(nodes: list[_Node], order: list[int], slots: dict[int, int]) -> tuple[Instruction, ...]:
    instructions = []
    previous: int | None = None
    for index in order:
        node = nodes[index]
        arguments: list[Argument] = []
        for k, item in enumerate(node.arguments):
            if not isinstance(item, int):
                arguments.append(item)
            else:
                arguments.append("prev" if item == previous and k != 2 else f"s{slots[item]}")
        instructions.append(Instruction(node.op.name, tuple(arguments), node.parameters, slots.get(index)))
        previous = index
    return tuple(instructions)


Part = Expr | float

_FP32 = torch.finfo(torch.float32)


class Affine:
    """slope and intercept: numbers, or expressions that do not read z (see `evaluate_expression`).

    slope_operands and intercept_operands: the numbers of the operands that each depends on, ascending.
    """

    def __init__(self, slope: Part, intercept: Part) -> None:
        self.slope = slope
        self.intercept = intercept
        self.slope_operands = _operands(slope)
        self.intercept_operands = _operands(intercept)

    @property
    def reads_z(self) -> bool:
        """Whether z is there at all: 0 * z is not 0 for every z."""
        return not (isinstance(self.slope, float) and self.slope == 0)

    def __repr__(self) -> str:
        return f"Affine(slope={self.slope!r}, intercept={self.intercept!r})"


def split_affine(root: Expr) -> Affine | None:
    """The affine form of an expression, or None where it is not affine in z, or not seen to be."""
    infix, prefix = op_table().infix, op_table().prefix
    rules: dict[int, Callable[[list[Affine]], Affine | None]] = {
        infix["+"].code: lambda items: _combine("+", *items),
        infix["-"].code: lambda items: _combine("-", *items),
        infix["*"].code: _multiply,
        infix["/"].code: _divide,
        prefix["-"].code: lambda items: _scale(items[0], "*", -1.0),
        prefix["+"].code: lambda items: items[0],
    }
    forms: dict[int, Affine | None] = {}
    for node in topological(root):
        if node.is_number or (node.reads and "z" not in node.reads):
            form: Affine | None = Affine(0.0, node if node.number is None else node.number)
        elif node.op is None:
            form = Affine(1.0, 0.0)
        else:
            items = [item for argument in node.arguments if (item := forms[id(argument)]) is not None]
            rule = rules.get(node.op.code)
            form = rule(items) if rule and len(items) == len(node.arguments) else None
            if form is not None and not _is_kept(form, node):
                form = None
        forms[id(node)] = form
    return forms[id(root)]


def is_factor(number: float) -> bool:
    """Whether numbers that were multiplied may stand in their product's place, in fp32 too: it is no less exact.

    A product that overflows or vanishes may belong to one with z that does not.
    """
    return number == 0 or _FP32.tiny <= abs(number) <= _FP32.max


def _is_kept(form: Affine, node: Expr) -> bool:
    """Whether the form is the node at infinities too, where z does not cancel, and a number where it reads nothing."""
    if isinstance(form.intercept, Expr) and not form.intercept.reads:
        return False
    numbers = [part for part in (form.slope, form.intercept) if isinstance(part, float)]
    return all(map(is_factor, numbers)) and ("z" not in node.reads or form.reads_z)


def _operands(part: Part) -> tuple[int, ...]:
    return tuple(sorted(int(leaf[1:]) for leaf in part.reads)) if isinstance(part, Expr) else ()


def compute(symbol: str, a: Part, b: Part) -> Part:
    """a symbol b, folding numbers and the neutral elements that the split itself brings in."""
    op = op_table().infix[symbol]
    if isinstance(a, float) and isinstance(b, float) and op.operator and not (symbol == "/" and b == 0):
        return float(op.operator(a, b))
    neutral = 0.0 if symbol in "+-" else 1.0
    if isinstance(b, float) and b == neutral:
        return a
    if isinstance(a, float) and a == neutral and symbol in "+*":
        return b
    return apply(op, (to_expression(a), to_expression(b)))


def _combine(symbol: str, a: Affine, b: Affine) -> Affine:
    return Affine(compute(symbol, a.slope, b.slope), compute(symbol, a.intercept, b.intercept))


def _scale(form: Affine, symbol: str, factor: Part) -> Affine:
    """form * factor or form / factor. A part that is 0 because z or a term is absent stays 0."""
    slope, intercept = (
        0.0 if isinstance(part, float) and part == 0 else compute(symbol, part, factor)
        for part in (form.slope, form.intercept)
    )
    return Affine(slope, intercept)


def _multiply(items: list[Affine]) -> Affine | None:
    for form, factor in (items, items[::-1]):
        if not factor.reads_z:
            return _scale(form, "*", factor.intercept)
    return None


def _divide(items: list[Affine]) -> Affine | None:
    return None if items[1].reads_z else _scale(items[0], "/", items[1].intercept)
