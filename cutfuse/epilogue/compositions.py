"""Torch functions that are not ops but that the ops of the table can spell, and ops with more spellings than one.

A composition has the torch function's own signature and returns an expression, or NotImplemented to leave the call to
the op table. It holds for every callable of the op that its path belongs to, unless it is marked exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, apply, to_expression, to_number
from cutfuse.epilogue.table import find_attribute, op_table

Composition = Callable[..., Any]

_registered: list[tuple[str, bool, Composition]] = []


def _composes(*paths: str, exact: bool = False) -> Callable[[Composition], Composition]:
    def register(function: Composition) -> Composition:
        _registered.extend((path, exact, function) for path in paths)
        return function

    return register


@functools.lru_cache(maxsize=1)
def compositions() -> dict[Callable[..., Any], Composition]:
    """By PyTorch callable; those that this version of PyTorch lacks are left out."""
    by_ops: dict[tuple, list[Callable[..., Any]]] = {}
    for function, candidates in op_table().callables.items():
        by_ops.setdefault(candidates, []).append(function)
    result: dict[Callable[..., Any], Composition] = {}
    for path, exact, composition in sorted(_registered, key=lambda entry: entry[1]):
        target = find_attribute(path)
        if target is not None:
            same_op = by_ops.get(op_table().callables.get(target, ()), [])
            result.update(dict.fromkeys([target] if exact or not same_op else same_op, composition))
    return result


def infix(symbol: str, a: Any, b: Any) -> Expr:
    """The op of an infix operator, with no rule applied."""
    return apply(op_table().infix[symbol], (to_expression(a), to_expression(b)))


def _both_boolean(a: Any, b: Any) -> bool:
    return isinstance(a, Expr) and isinstance(b, Expr) and a.is_boolean and b.is_boolean


def _check_condition(what: str, *values: Any) -> None:
    for value in values:
        if not (isinstance(value, bool) or (isinstance(value, Expr) and value.may_be_condition)):
            raise EpilogueError(f"{what} takes comparisons, such as z > 0, or operands that are masks; got {value!r}")


def logical(symbol: str, *arguments: Any) -> Expr:
    """The operators & | ^ ~, which PyTorch has for booleans but not for floats."""
    _check_condition(f"the operator {symbol}", *arguments)
    if len(arguments) == 1:
        return apply(op_table().prefix[symbol], (to_expression(arguments[0]),))
    if symbol == "^":
        flags = (item if _both_boolean(item, item) else infix("!=", item, 0.0) for item in arguments)
        return infix("!=", *flags)
    return infix(symbol, *arguments)


# PyTorch adds and multiplies booleans as "or" and "and", and does not subtract them.
@_composes("torch.add")
def add(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    if _both_boolean(input, other):
        return infix("|", input, other)
    return infix("+", input, _scaled(other, alpha))


@_composes("torch.sub")
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    if _both_boolean(input, other):
        raise EpilogueError(f"PyTorch does not subtract booleans, {input!r} - {other!r}: use ^ or ~, or .float() first")
    return infix("-", input, _scaled(other, alpha))


@_composes("torch.rsub")
def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return sub(other, input, alpha=alpha)


@_composes("torch.mul")
def mul(input: Any, other: Any) -> Expr:
    return infix("&" if _both_boolean(input, other) else "*", input, other)


def _scaled(value: Any, alpha: Any) -> Any:
    return value if to_number(alpha, "alpha") == 1 else infix("*", value, alpha)


@_composes("torch.div")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Expr:
    quotient = infix("/", input, other)
    if rounding_mode is None:
        return quotient
    if rounding_mode not in ("trunc", "floor"):
        raise EpilogueError(f"div: rounding_mode has to be None, 'trunc' or 'floor', got {rounding_mode!r}")
    return torch.trunc(quotient) if rounding_mode == "trunc" else torch.floor(quotient)


@_composes("torch.pow")
def power(input: Any, exponent: Any) -> Any:
    """The exponents that PyTorch computes by multiplication and square roots, and powers of 2."""
    if not isinstance(input, Expr):
        return torch.exp2(exponent) if to_number(input, "the base") == 2 else NotImplemented
    if isinstance(exponent, Expr):
        return NotImplemented
    match to_number(exponent, "the exponent"):
        case 1:
            return input
        case 2:
            return torch.square(input)
        case 3:
            return torch.square(input) * input
        case 0.5:
            return torch.sqrt(input)
        case -0.5:
            return torch.rsqrt(input)
        case -1:
            return torch.reciprocal(input)
        case -2:
            return torch.reciprocal(torch.square(input))
    return NotImplemented


@_composes("torch.where")
def where(condition: Any, input: Any, other: Any) -> Any:
    _check_condition("torch.where", condition)
    return NotImplemented


@_composes("torch.Tensor.where", exact=True)
def where_method(self: Any, condition: Any, other: Any) -> Any:
    return torch.where(condition, self, to_expression(other))


@_composes("torch.masked_fill", "torch.Tensor.masked_fill")
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    return torch.where(mask, to_expression(value), input)


@_composes("torch.clamp")
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """Bounds that are expressions; numbers are parameters of the op."""
    if not isinstance(min, Expr) and not isinstance(max, Expr):
        return NotImplemented
    low = input if min is None else torch.maximum(to_expression(input), to_expression(min))
    return low if max is None else torch.minimum(low, to_expression(max))


@_composes("torch.clamp_min", "torch.Tensor.clamp_min")
def clamp_min(input: Any, min: Any) -> Any:
    return torch.clamp(to_expression(input), min=min)


@_composes("torch.clamp_max", "torch.Tensor.clamp_max")
def clamp_max(input: Any, max: Any) -> Any:
    return torch.clamp(to_expression(input), max=max)


@_composes("torch.max", "torch.Tensor.max")
def maximum_of_two(input: Any, other: Any) -> Any:
    return torch.maximum(to_expression(input), to_expression(other))


@_composes("torch.min", "torch.Tensor.min")
def minimum_of_two(input: Any, other: Any) -> Any:
    return torch.minimum(to_expression(input), to_expression(other))


@_composes("torch.addcmul", "torch.Tensor.addcmul")
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return add(input, mul(tensor1, tensor2), alpha=value)


@_composes("torch.addcdiv", "torch.Tensor.addcdiv")
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return add(input, div(tensor1, tensor2), alpha=value)


@_composes("torch.lerp", "torch.Tensor.lerp")
def lerp(input: Any, end: Any, weight: Any) -> Any:
    step = sub(end, input)
    if not isinstance(weight, Expr) and to_number(weight, "weight") >= 0.5:
        return sub(end, mul(step, 1 - to_number(weight, "weight")))
    return add(input, mul(weight, step))


@_composes("torch.nn.functional.threshold")
def threshold(input: Any, threshold: Any, value: Any, inplace: bool = False) -> Any:
    return torch.where(input <= threshold, to_expression(value), input)


@_composes("torch.hardshrink", "torch.nn.functional.hardshrink", "torch.Tensor.hardshrink")
def hardshrink(input: Any, lambd: float = 0.5) -> Any:
    return torch.where((input >= -lambd) & (input <= lambd), to_expression(0.0), input)


@_composes("torch.nn.functional.softshrink")
def softshrink(input: Any, lambd: float = 0.5) -> Any:
    return input - torch.clamp(input, -lambd, lambd)


@_composes("torch.nn.functional.tanhshrink")
def tanhshrink(input: Any) -> Any:
    return input - torch.tanh(input)


@_composes("torch.prelu", "torch.nn.functional.prelu", "torch.Tensor.prelu")
def prelu(input: Any, weight: Any) -> Any:
    return torch.where(input > 0, input, mul(weight, input))


@_composes("torch.rrelu", "torch.nn.functional.rrelu")
def rrelu(input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    return prelu(_without_noise("rrelu", input, training), (lower + upper) / 2)


@_composes(
    "torch.dropout",
    "torch.alpha_dropout",
    "torch.nn.functional.dropout",
    "torch.nn.functional.dropout1d",
    "torch.nn.functional.dropout2d",
    "torch.nn.functional.dropout3d",
    "torch.nn.functional.alpha_dropout",
    "torch.nn.functional.feature_alpha_dropout",
)
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return _without_noise("dropout", input, training and p > 0)


def _without_noise(name: str, input: Any, noisy: bool) -> Any:
    if noisy:
        raise EpilogueError(
            f"{name} draws random numbers while training, which an epilogue cannot: apply it after the call, or pass "
            "training=False (module.eval())"
        )
    return input


@_composes("torch.Tensor.float", "torch.Tensor.contiguous")
def as_float(self: Expr, *, memory_format: Any = None) -> Expr:
    return apply(op_table().identity, (self,))


@_composes("torch.Tensor.to", "torch.Tensor.type")
def cast(self: Expr, dtype: Any, *, copy: bool = False, non_blocking: bool = False) -> Expr:
    if dtype != torch.float32:
        raise EpilogueError(
            f"the epilogue casts to {dtype}, but its arithmetic is float32 throughout; out_dtype= is the result's type"
        )
    return as_float(self)


@_composes("torch.Tensor.type_as")
def type_as(self: Expr, other: Expr) -> Expr:
    return as_float(self)
