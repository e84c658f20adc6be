"""Recognises an epilogue that is affine in the pre-activation: slope * z + intercept.

A sum or mean of such an epilogue over the columns needs no matrix product. Nothing else decides this: the kernels'
`find_scaling` looks for a program that is a product, and `prepare` folds an instruction with a number into another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cutfuse.epilogue.expression import Expr, apply, to_expression, topological
from cutfuse.epilogue.table import op_table

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


def _compute(symbol: str, a: Part, b: Part) -> Part:
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
    return Affine(_compute(symbol, a.slope, b.slope), _compute(symbol, a.intercept, b.intercept))


def _scale(form: Affine, symbol: str, factor: Part) -> Affine:
    """form * factor or form / factor. A part that is 0 because z or a term is absent stays 0."""
    slope, intercept = (
        0.0 if isinstance(part, float) and part == 0 else _compute(symbol, part, factor)
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
