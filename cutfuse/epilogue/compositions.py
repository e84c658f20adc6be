"""Torch functions that the ops of the table spell, with PyTorch's values, types and derivatives at special values.

Casts are among them. Arithmetic is fp32 (fp64 for fp64) whatever the types are. So a cast to a narrower type rounds,
and every other one only marks the value as one of that type, which decides promotion and the result's type.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import (
    Expr,
    apply,
    constant,
    to_expression,
    to_number,
    to_symbolic,
    topological,
    with_type,
)
from cutfuse.epilogue.table import NUMBERS, ONCE, STEPS, UNKNOWN_STEPS, Composition, Op, composes, op_table
from cutfuse.epilogue.types import BOOLEAN, INPUTS, InputDtype, ValueType, refuse_unknown_type


def _probe() -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones(1, device="cpu", requires_grad=True)
        # The node by itself: autograd's engine would start its threads, for every device.
        node: Any = torch.fmax(one, torch.ones(1, device="cpu", requires_grad=True)).grad_fn
        gradient, _ = node(torch.ones(1, device="cpu"))
        return bool(gradient.item() == 0.5)


_HALVED = _probe()


def ties_are_halved() -> bool:
    """Whether fmax, fmin and clamp with tensor bounds halve the derivative at a tie, and clamp has none at its bounds.

    PyTorch does from 2.14 on, as it always did in maximum and minimum; before, all of it goes to the first argument.
    """
    return _HALVED


# The ops that round, by the type to which they do.
ROUNDING = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float"}


def cast(value: Expr, dtype: torch.dtype | InputDtype) -> Expr:
    """The value as one of another type. Raises EpilogueError for types in which an epilogue cannot compute."""
    if isinstance(dtype, InputDtype):
        return value if value.type == INPUTS else apply(op_table().identity, (value,), (), INPUTS)
    if value.type.dtype is dtype and not value.type.is_number:
        return value
    type = ValueType(dtype, value.type.is_scalar)
    if dtype is torch.bool:
        return apply(op_table().infix["!="], (value, constant(0.0)), (), type)
    if dtype is torch.float64 and not _may_be_wide(value):
        raise EpilogueError(
            f"the epilogue casts {value.type.dtype} to torch.float64, but its arithmetic is fp32: pass x or the "
            "operand in float64"
        )
    if dtype not in (*ROUNDING, torch.float64):
        raise EpilogueError(
            f"the epilogue casts to {dtype}, which it cannot compute in: it casts to torch.bool and to float16, "
            "bfloat16, float32 and float64; out_dtype= is the result's type"
        )
    if is_rounding(value.type.dtype, dtype):
        return apply(op_table().op(ROUNDING[dtype]), (value,), (), type)
    # A copy, so that the cast is known apart from the op whose result it is, where the types are not known yet.
    return apply(op_table().identity, (value,), (), type)


def _may_be_wide(value: Expr) -> bool:
    """Whether a value may be computed in fp64: the call does, or its types are not known. Numbers are exact."""
    leaves = [node.type for node in topological(value) if node.leaf]
    return value.is_boolean or not leaves or any(item.in_fp64 or item.dtype is None for item in leaves)


def is_rounding(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Whether a cast loses digits of the arithmetic's fp32 or fp64 value. `source` is None where it is not known."""
    if source is torch.bool or target is torch.float64:
        return False
    return target is not torch.float32 or source is torch.float64


def _compose_cast(name: str, dtype: torch.dtype, formula: str) -> None:
    def method(self: Expr, *, memory_format: Any = None) -> Expr:
        return cast(self, dtype)

    method.__doc__ = formula
    composes(f"torch.Tensor.{name}", exact=True, rounding=ONCE)(method)


_compose_cast("float", torch.float32, "a, of type float32")
_compose_cast("half", torch.float16, "a rounded to float16")
_compose_cast("bfloat16", torch.bfloat16, "a rounded to bfloat16")
_compose_cast("double", torch.float64, "a, of type float64, where x or an operand is")
_compose_cast("bool", torch.bool, "a != 0")


@composes("torch.Tensor.to", rounding=ONCE)
def to(self: Expr, other: Any = None, *rest: Any, dtype: Any = None, **placement: Any) -> Expr:
    """a rounded to a dtype, or to that of another value; other arguments of it change no value"""
    target = dtype if other is None else other
    if isinstance(target, Expr):
        return type_as(self, target)
    if isinstance(target, str | torch.device) or isinstance(placement.get("device"), str | torch.device):
        raise EpilogueError("the epilogue moves a value to a device: it runs where x is; move the operands beforehand")
    return cast(self, _check_dtype(target))


@composes("torch.Tensor.type", rounding=ONCE)
def type_method(self: Expr, dtype: Any = None, non_blocking: bool = False) -> Expr:
    """a rounded to a dtype"""
    return cast(self, _check_dtype(dtype))


@composes("torch.Tensor.type_as", rounding=ONCE)
def type_as(self: Expr, other: Expr) -> Expr:
    """a rounded to the type of b"""
    return cast(self, other.dtype)


def _check_dtype(dtype: Any) -> torch.dtype | InputDtype:
    if not isinstance(dtype, torch.dtype | InputDtype):
        raise EpilogueError(f"the epilogue casts to {dtype!r}, which is not a torch.dtype")
    return dtype


@composes("torch.isnan", rounding=NUMBERS)
def isnan(input: Any) -> Any:
    """a != a"""
    return input != input


@composes("torch.isclose")
def isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """a == b, or a finite |a - b| <= atol + rtol * |b|"""
    difference = torch.abs(input - other)
    close = (difference <= torch.abs(rtol * to_symbolic(other)) + atol) & (difference < math.inf) | (input == other)
    return close | (isnan(input) & isnan(other)) if equal_nan else close


def _truth(value: Any) -> Any:
    node = to_expression(value)
    return node if node.is_boolean else node != 0


@composes("torch.nan_to_num", rounding=ONCE)
def nan_to_num(input: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """a where it is finite; infinities become the type's largest and smallest number where none is given"""
    # What is replaced has no derivative. PyTorch multiplies by 0 there, which is NaN under an infinite derivative.
    if input.is_boolean:
        return input
    high = torch.finfo(input.dtype).max if posinf is None else to_number(posinf, "posinf of nan_to_num")
    low = torch.finfo(input.dtype).min if neginf is None else to_number(neginf, "neginf of nan_to_num")
    finite = torch.where(input == math.inf, high, torch.where(input == -math.inf, low, input))
    return torch.where(isnan(input), 0.0 if nan is None else to_number(nan, "nan of nan_to_num"), finite)


@composes("torch.sinc")
def sinc(input: Any) -> Any:
    """sin(pi * a) / (pi * a), and 1 at 0"""
    at_zero = input == 0
    angle = torch.where(at_zero, 1.0, input * math.pi)  # the quotient has no 0 / 0 that a derivative could meet
    return torch.where(at_zero, 1.0, torch.sin(angle) / angle)


@composes("torch.angle")
def angle(input: Any) -> Any:
    """pi if a < 0 else 0"""
    zero = torch.sign(input) * 0.0  # of the input's type, which two numbers would not have
    return torch.where(isnan(input), math.nan, torch.where(input < 0, math.pi, zero))


@composes("torch.heaviside", rounding=NUMBERS)
def heaviside(input: Any, values: Any) -> Any:
    """0 below 0, 1 above, and values at 0. PyTorch has no derivative of it; here that of input is 0"""
    # Each number beside a value, whose type the choice then has.
    return torch.where(input > 0, 1.0, torch.where(input == 0, to_symbolic(values), 0.0))


@composes("torch.round", rounding=ONCE)
def round(input: Any, *, decimals: int | None = None) -> Any:
    """a rounded to so many decimals, ties to even; negative decimals count before the point"""
    if decimals is None:
        return NotImplemented
    scale = 10.0 ** abs(to_number(decimals, "decimals of round"))
    if decimals == 0:
        return torch.round(input)
    return torch.round(input * scale) / scale if decimals > 0 else torch.round(input / scale) * scale


def _unless_nan(choose: Callable[..., Any], is_chosen: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if not ties_are_halved():
        return torch.where(is_chosen(a, b) | isnan(b), a, b)
    chosen = choose(to_expression(a), to_expression(b))
    return torch.where(isnan(b), a, torch.where(isnan(a), b, chosen))


def _log_of_sum(a: Any, b: Any, exponential: Callable[[Any], Any], log_of_base: float) -> Any:
    # Equal infinities have no difference. Half of each, so that both have PyTorch's derivative, 1 / 2 at a tie.
    equal = 0.5 * to_expression(a) + 0.5 * to_expression(b) + math.log(2) / log_of_base
    rest = torch.log1p(exponential(-torch.abs(a - b)))
    larger = torch.maximum(to_symbolic(a), to_symbolic(b))
    return torch.where(a == b, equal, larger + (rest if log_of_base == 1 else rest / log_of_base))


@composes("torch.xlogy", "torch.special.xlog1py")
def times_logarithm_of_nan(input: Any, other: Any) -> Any:
    """Only where b is the Python number NaN (other b are ops of the table): NaN, whose derivative is 0 where a is 0 and
    NaN elsewhere"""
    # PyTorch asks whether a number is positive, and otherwise has no derivative at a = 0. Of a tensor it asks whether
    # that is 0 or negative, which NaN is not.
    if isinstance(other, Expr | torch.Tensor) or not math.isnan(to_number(other, "an argument")):
        return NotImplemented
    return torch.where(input == 0, 0.0, input) * math.nan


@composes("torch.full_like", rounding=ONCE)
def full_like(input: Expr, fill_value: Any, *, dtype: Any = None, requires_grad: bool = False) -> Expr:
    """fill_value, a number"""
    if requires_grad:
        raise EpilogueError("a constant that requires a gradient has none outside of the epilogue: pass it as operand")
    type = _type_like(input) if dtype is None else ValueType(dtype, input.type.is_scalar)
    number = to_number(fill_value, "fill_value of full_like")
    if type.dtype is not None and not type.is_integer:  # integers are refused by their type
        number = torch.tensor(number, dtype=torch.float64, device="cpu").to(type.dtype).item()
    return constant(number, type)


def _type_like(value: Expr) -> ValueType:
    """The value's type; ahead of time the name of the input that has it."""
    if value.type.dtype is not None:
        return value.type
    if value.leaf:
        return ValueType(like=value.leaf)
    return INPUTS if value.reads == {"z"} else refuse_unknown_type()


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


# PyTorch adds and multiplies booleans as "or" and "and", and does not subtract them.
@composes("torch.add", rounding=ONCE)
def add(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    """a + alpha * b"""
    if _both_boolean(input, other):
        return infix("|", input, other)
    return infix("+", input, _scaled(other, alpha))


@composes("torch.sub", rounding=ONCE)
def sub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    """a - alpha * b"""
    if _both_boolean(input, other):
        raise EpilogueError(f"PyTorch does not subtract booleans, {input!r} - {other!r}: use ^ or ~, or .float() first")
    return infix("-", input, _scaled(other, alpha))


@composes("torch.mul", rounding=ONCE)
def mul(input: Any, other: Any) -> Expr:
    """a * b"""
    return infix("&" if _both_boolean(input, other) else "*", input, other)


def _scaled(value: Any, alpha: Any) -> Any:
    return value if to_number(alpha, "alpha") == 1 else infix("*", value, alpha)


@composes("torch.div", rounding=ONCE)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Expr:
    """a / b, rounded down or towards 0"""
    for op in op_table().callables[torch.div]:
        if dict(op.literals).get("rounding_mode") == rounding_mode:
            return apply(op, (to_expression(input), to_expression(other)))
    raise EpilogueError(f"div: rounding_mode has to be None, 'trunc' or 'floor', got {rounding_mode!r}")


@composes("torch.pow", rounding=STEPS)
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


@composes("torch.where", rounding=ONCE)
def where(condition: Any, input: Any, other: Any) -> Any:
    """b if condition else c"""
    mask = as_mask("torch.where", condition)
    return apply(op_table().op("where"), (mask, to_expression(input), to_expression(other)))


@composes("torch.Tensor.where", exact=True, rounding=ONCE)
def where_method(self: Any, condition: Any, other: Any) -> Any:
    """a if condition else b"""
    return torch.where(condition, self, to_symbolic(other))


@composes("torch.masked_fill", rounding=ONCE)
def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    """value if mask else a"""
    a, filled = to_expression(input), to_expression(value)
    if filled.is_number and (a.type.dtype is not None or a.leaf):
        filled = full_like(a, value)
    elif a.is_boolean:
        filled = filled != 0
    return torch.where(mask, to_symbolic(filled), to_symbolic(a))


@composes("torch.clamp", rounding=ONCE)
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


def _bounded(choose: Callable[..., Any], value: Any, **bound: Any) -> Any:
    """clamp_min and clamp_max. bound: by its name in torch.clamp."""
    (limit,) = bound.values()
    if not isinstance(limit, Expr):
        return torch.clamp(to_symbolic(value), **bound)
    return choose(to_symbolic(value), to_symbolic(limit)) if ties_are_halved() else NotImplemented


@composes("torch.lerp")
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """a + weight * (b - a), of sums and products where weight is a number"""
    if isinstance(weight, Expr):
        return NotImplemented
    # So that an affine epilogue is seen to be one.
    step, number = sub(end, input), to_number(weight, "weight")
    return add(input, mul(number, step)) if abs(number) < 0.5 else sub(end, mul(step, 1 - number))


@composes("torch.nn.functional.prelu", rounding=NUMBERS)
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
    rounding=ONCE,
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


def _formula(paths: str, formula: str, function: Composition, rounding: str = UNKNOWN_STEPS) -> None:
    """Registers what is one expression."""
    function.__doc__ = formula
    composes(*paths.split(), rounding=rounding)(function)


_formula("torch.isinf", "|a| == inf", lambda input: torch.abs(input) == math.inf, NUMBERS)
_formula("torch.isfinite", "|a| < inf", lambda input: torch.abs(input) < math.inf, NUMBERS)
_formula("torch.isposinf", "a == inf", lambda input: input == math.inf, NUMBERS)
_formula("torch.isneginf", "a == -inf", lambda input: input == -math.inf, NUMBERS)
_formula("torch.signbit", "copysign(1, a) < 0", lambda input: torch.copysign(to_symbolic(1.0), input) < 0, NUMBERS)
_formula("torch.logical_xor", "(a != 0) != (b != 0)", lambda input, other: _truth(input) != _truth(other), NUMBERS)
_formula("torch.bitwise_and", "a & b", lambda input, other: logical("&", input, other), NUMBERS)
_formula("torch.bitwise_or", "a | b", lambda input, other: logical("|", input, other), NUMBERS)
_formula("torch.bitwise_xor torch.Tensor.__xor__", "a ^ b", lambda input, other: logical("^", input, other), NUMBERS)
_formula("torch.bitwise_not", "~a", lambda input: logical("~", input), NUMBERS)
_formula("torch.max", "max(a, b)", lambda input, other: torch.maximum(to_symbolic(input), to_symbolic(other)), NUMBERS)
_formula("torch.min", "min(a, b)", lambda input, other: torch.minimum(to_symbolic(input), to_symbolic(other)), NUMBERS)
_formula("torch.clamp_min", "max(a, min)", lambda input, min: _bounded(torch.maximum, input, min=min), ONCE)
_formula("torch.clamp_max", "min(a, max)", lambda input, max: _bounded(torch.minimum, input, max=max), ONCE)
_formula(
    "torch.fmax",
    "max(a, b), and the other one where one is NaN",
    lambda input, other: _unless_nan(torch.maximum, operator.ge, input, other),
)
_formula(
    "torch.fmin",
    "min(a, b), and the other one where one is NaN",
    lambda input, other: _unless_nan(torch.minimum, operator.le, input, other),
)
_formula("torch.frac", "a - trunc(a)", lambda input: input - torch.trunc(input), NUMBERS)
_formula(
    "torch.nn.functional.threshold",
    "a if a > threshold else value",
    lambda input, threshold, value, inplace=False: torch.where(input <= threshold, to_symbolic(value), input),
    NUMBERS,
)
_formula(
    "torch.nn.functional.hardshrink",
    "a, and 0 where |a| <= lambd",
    lambda input, lambd=0.5: torch.where((input >= -lambd) & (input <= lambd), to_symbolic(0.0), input),
    NUMBERS,
)
_formula("torch.nn.functional.tanhshrink", "a - tanh(a)", lambda input: input - torch.tanh(input), STEPS)
_formula(
    "torch.real torch.conj torch.conj_physical torch.resolve_conj torch.resolve_neg", "a", lambda input: input, ONCE
)
_formula("torch.Tensor.contiguous", "a", lambda self, *, memory_format=None: self, ONCE)
_formula("torch.rsub", "b - alpha * a", lambda input, other, *, alpha=1: sub(other, input, alpha=alpha), ONCE)
_formula("torch.tan", "sin(a) / cos(a)", lambda input: torch.sin(input) / torch.cos(input))
_formula("torch.deg2rad", "a * pi / 180", lambda input: input * (math.pi / 180))
_formula("torch.rad2deg", "a * 180 / pi", lambda input: input * (180 / math.pi))
_formula("torch.ldexp", "a * 2 ** b", lambda input, other: input * torch.exp2(to_symbolic(other)))
_formula("torch.special.ndtr", "erfc(-a / sqrt(2)) / 2", lambda input: 0.5 * torch.erfc(input * -math.sqrt(0.5)))
_formula(
    "torch.logaddexp",
    "ln(exp(a) + exp(b)), without overflow",
    lambda input, other: _log_of_sum(input, other, torch.exp, 1.0),
)
_formula(
    "torch.logaddexp2",
    "log2(2 ** a + 2 ** b), without overflow",
    lambda input, other: _log_of_sum(input, other, torch.exp2, math.log(2)),
)
_formula(
    "torch.addcmul",
    "a + value * b * c",
    lambda input, tensor1, tensor2, *, value=1: add(input, mul(_scaled(tensor1, value), tensor2)),
)
_formula(
    "torch.addcdiv",
    "a + value * b / c",
    lambda input, tensor1, tensor2, *, value=1: add(input, div(_scaled(tensor1, value), tensor2)),
)
_formula(
    "torch.nn.functional.softshrink",
    "a - copysign(lambd, a), and 0 where |a| <= lambd",
    lambda input, lambd=0.5: torch.where(
        torch.abs(input) <= lambd, to_symbolic(0.0), input - torch.copysign(to_symbolic(lambd), input)
    ),
)
_formula(
    "torch.zeros_like",
    "0",
    lambda input, *, dtype=None, requires_grad=False: full_like(input, 0.0, dtype=dtype, requires_grad=requires_grad),
    ONCE,
)
_formula(
    "torch.ones_like",
    "1",
    lambda input, *, dtype=None, requires_grad=False: full_like(input, 1.0, dtype=dtype, requires_grad=requires_grad),
    ONCE,
)
