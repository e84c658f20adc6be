"""Arithmetic, masks and activations that the ops of the table spell, and ops with more spellings than one."""

from __future__ import annotations

import math
from typing import Any

import torch

from cutfuse.epilogue.elementary import full_like
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, apply, to_expression, to_number, to_symbolic, with_type
from cutfuse.epilogue.registry import composes, compositions
from cutfuse.epilogue.table import Op, op_table
from cutfuse.epilogue.ties import ties_are_halved
from cutfuse.epilogue.types import BOOLEAN

__all__ = ["compositions", "infix", "logical"]


def infix(symbol: str, a: Any, b: Any) -> Expr:
    """The op of an infix operator, without the rules for booleans and numbers."""
    return apply(op_table().infix[symbol], (to_expression(a), to_expression(b)))


def _both_boolean(a: Any, b: Any) -> bool:
    return all(item.is_boolean if isinstance(item, Expr) else isinstance(item, bool) for item in (a, b))


def as_mask(what: str, value: Any) -> Any:
    """A condition. Where the type of an operand is not known yet, this says that it has to be boolean."""
    if isinstance(value, bool):
        return to_expression(value)
    if isinstance(value, Expr) and value.is_boolean:
        return value
    if isinstance(value, Expr) and value.may_be_condition:
        return with_type(value, BOOLEAN)
    found = f"{value!r} of type {value.type.dtype}" if isinstance(value, Expr) and value.type.dtype else f"{value!r}"
    raise EpilogueError(f"{what} takes comparisons, such as z > 0, or operands that are masks; got {found}")


def logical(symbol: str, *arguments: Any) -> Expr:
    """The operators & | ^ ~, which PyTorch has for booleans but not for floats."""
    masks = tuple(as_mask(f"the operator {symbol}", item) for item in arguments)
    if len(masks) == 1:
        return apply(op_table().prefix[symbol], masks, (), BOOLEAN)
    return infix("!=" if symbol == "^" else symbol, *masks)


@composes("torch.bitwise_and")
def bitwise_and(input: Any, other: Any) -> Expr:
    """a & b"""
    return logical("&", input, other)


@composes("torch.bitwise_or")
def bitwise_or(input: Any, other: Any) -> Expr:
    """a | b"""
    return logical("|", input, other)


@composes("torch.bitwise_xor", "torch.Tensor.__xor__")
def bitwise_xor(input: Any, other: Any) -> Expr:
    """a ^ b"""
    return logical("^", input, other)


@composes("torch.bitwise_not")
def bitwise_not(input: Any) -> Expr:
    """~a"""
    return logical("~", input)


# PyTorch adds and multiplies booleans as "or" and "and", and does not subtract them.
@composes("torch.add")
def add(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    """a + alpha * b"""
    if _both_boolean(input, other):
        return infix("|", input, other)
    return infix("+", input, _scaled(other, alpha))


@composes("torch.sub")
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    """a - alpha * b"""
    if _both_boolean(input, other):
        raise EpilogueError(f"PyTorch does not subtract booleans, {input!r} - {other!r}: use ^ or ~, or .float() first")
    return infix("-", input, _scaled(other, alpha))


@composes("torch.rsub")
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    """b - alpha * a"""
    return sub(other, input, alpha=alpha)


@composes("torch.mul")
def mul(input: Any, other: Any) -> Expr:
    """a * b"""
    return infix("&" if _both_boolean(input, other) else "*", input, other)


def _scaled(value: Any, alpha: Any) -> Any:
    return value if to_number(alpha, "alpha") == 1 else infix("*", value, alpha)


@composes("torch.div")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Expr:
    """a / b, rounded down or towards 0"""
    for op in op_table().callables[torch.div]:
        if dict(op.literals).get("rounding_mode") == rounding_mode:
            return apply(op, (to_expression(input), to_expression(other)))
    raise EpilogueError(f"div: rounding_mode has to be None, 'trunc' or 'floor', got {rounding_mode!r}")


@composes("torch.pow")
def power(input: Any, exponent: Any) -> Any:
    """a ** b; by multiplication and square roots where b is 1, 2, 3, 0.5, -0.5 or -1, and exp2(b) where a is 2"""
    if not isinstance(input, Expr):
        return torch.exp2(exponent) if to_number(input, "the base") == 2 else NotImplemented
    if isinstance(exponent, Expr):
        return NotImplemented
    # PyTorch computes these values so. Its 1 / (a * a) is not here: where a * a is 0 or overflows, it has 0 * inf for a
    # derivative, and PyTorch has -2 * a ** -3.
    base = to_symbolic(input)
    match to_number(exponent, "the exponent"):
        case 1:
            return base
        case 2:
            return torch.square(base)
        case 3:
            return torch.square(base) * base
        case 0.5:
            return torch.sqrt(base)
        case -0.5:
            return torch.rsqrt(base)
        case -1:
            return torch.reciprocal(base)
    return NotImplemented


@composes("torch.where")
def where(condition: Any, input: Any, other: Any) -> Any:
    """b if condition else c"""
    mask = as_mask("torch.where", condition)
    return apply(op_table().op("where"), (mask, to_expression(input), to_expression(other)))


@composes("torch.Tensor.where", exact=True)
def where_method(self: Any, condition: Any, other: Any) -> Any:
    """a if condition else b"""
    return torch.where(condition, self, to_symbolic(other))


@composes("torch.masked_fill")
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    """value if mask else a"""
    a, filled = to_expression(input), to_expression(value)
    if filled.is_number and (a.type.dtype is not None or a.leaf):
        filled = full_like(a, value)
    elif a.is_boolean:
        filled = filled != 0
    return torch.where(mask, to_symbolic(filled), to_symbolic(a))


@composes("torch.clamp")
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """min(max(a, min), max), where a bound may be left out"""
    if min is None and max is None:
        raise EpilogueError("torch.clamp: one of min and max has to be given")
    if not isinstance(min, Expr) and not isinstance(max, Expr):
        return _clamp_by_numbers(to_expression(input), min, max)
    if max is None:
        return torch.clamp_min(to_symbolic(input), min)
    if min is None:
        return torch.clamp_max(to_symbolic(input), max)
    return apply(_clamp_op(3), tuple(map(to_expression, (input, min, max))))


def _clamp_by_numbers(a: Expr, min: Any, max: Any) -> Expr:
    lower = -math.inf if min is None else to_number(min, "min of torch.clamp")
    upper = math.inf if max is None else to_number(max, "max of torch.clamp")
    if not ties_are_halved():
        return apply(_clamp_op(1), (a,), (lower, upper))
    is_bounded = lower != -math.inf or upper != math.inf
    clamped: Any = apply(_clamp_op(1), (a,), (lower, upper)) if is_bounded else a
    # At a bound that is given there is no derivative, also if it is infinite. Infinities and NaN are their own trunc,
    # which has none.
    if min is not None and lower == -math.inf:
        clamped = torch.where(a > lower, clamped, torch.trunc(to_symbolic(a)))
    if max is not None and upper == math.inf:
        clamped = torch.where(a < upper, clamped, torch.trunc(to_symbolic(a)))
    return to_expression(clamped)


def _clamp_op(arity: int) -> Op:
    """The row with this PyTorch's derivative at ties, of the two that there are for bounds of a kind."""
    older, newer = (op for op in op_table().callables[torch.clamp] if op.arity == arity)
    return newer if ties_are_halved() else older


@composes("torch.clamp_min")
def clamp_min(input: Any, min: Any) -> Any:
    """max(a, min)"""
    if not isinstance(min, Expr):
        return torch.clamp(to_symbolic(input), min=min)
    return torch.maximum(to_symbolic(input), to_symbolic(min)) if ties_are_halved() else NotImplemented


@composes("torch.clamp_max")
def clamp_max(input: Any, max: Any) -> Any:
    """min(a, max)"""
    if not isinstance(max, Expr):
        return torch.clamp(to_symbolic(input), max=max)
    return torch.minimum(to_symbolic(input), to_symbolic(max)) if ties_are_halved() else NotImplemented


@composes("torch.max")
def maximum_of_two(input: Any, other: Any) -> Any:
    """max(a, b)"""
    return torch.maximum(to_symbolic(input), to_symbolic(other))


@composes("torch.min")
def minimum_of_two(input: Any, other: Any) -> Any:
    """min(a, b)"""
    return torch.minimum(to_symbolic(input), to_symbolic(other))


@composes("torch.addcmul")
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """a + value * b * c"""
    return add(input, mul(_scaled(tensor1, value), tensor2))


@composes("torch.addcdiv")
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    """a + value * b / c"""
    return add(input, div(_scaled(tensor1, value), tensor2))


@composes("torch.lerp")
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """a + weight * (b - a), of sums and products where weight is a number"""
    if isinstance(weight, Expr):
        return NotImplemented
    # So that an affine epilogue is seen to be one.
    step, number = sub(end, input), to_number(weight, "weight")
    return add(input, mul(number, step)) if abs(number) < 0.5 else sub(end, mul(step, 1 - number))


@composes("torch.nn.functional.threshold")
def threshold(input: Any, threshold: Any, value: Any, inplace: bool = False) -> Any:
    """a if a > threshold else value"""
    return torch.where(input <= threshold, to_symbolic(value), input)


@composes("torch.nn.functional.hardshrink")
def hardshrink(input: Any, lambd: float = 0.5) -> Any:
    """a, and 0 where |a| <= lambd"""
    return torch.where((input >= -lambd) & (input <= lambd), to_symbolic(0.0), input)


@composes("torch.nn.functional.softshrink")
def softshrink(input: Any, lambd: float = 0.5) -> Any:
    """a - copysign(lambd, a), and 0 where |a| <= lambd"""
    return torch.where(torch.abs(input) <= lambd, to_symbolic(0.0), input - torch.copysign(to_symbolic(lambd), input))


@composes("torch.nn.functional.tanhshrink")
def tanhshrink(input: Any) -> Any:
    """a - tanh(a)"""
    return input - torch.tanh(input)


@composes("torch.nn.functional.prelu")
def prelu(input: Any, weight: Any) -> Any:
    """a if a > 0 else weight * a"""
    positive = input > 0
    # Where a is positive, 0 and not a: a large a has no say in the derivative by the weight.
    return torch.where(positive, input, to_symbolic(mul(weight, torch.where(positive, 0.0, input))))


@composes("torch.nn.functional.rrelu")
def rrelu(input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    """a if a > 0 else (lower + upper) / 2 * a, without training"""
    return prelu(_without_noise("rrelu", input, training), (lower + upper) / 2)


@composes(
    "torch.nn.functional.dropout",
    "torch.nn.functional.dropout1d",
    "torch.nn.functional.dropout2d",
    "torch.nn.functional.dropout3d",
    "torch.nn.functional.alpha_dropout",
    "torch.nn.functional.feature_alpha_dropout",
)
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """a, without training"""
    return _without_noise("dropout", input, training and p > 0)


def _without_noise(name: str, input: Any, noisy: bool) -> Any:
    if noisy:
        raise EpilogueError(
            f"{name} draws random numbers while training, which an epilogue cannot: apply it after the call, or pass "
            "training=False (module.eval())"
        )
    return input
