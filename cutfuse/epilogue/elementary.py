"""Elementary functions that the ops of the table spell, with PyTorch's values and derivatives at special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, constant, to_expression, to_number, to_symbolic
from cutfuse.epilogue.registry import composes
from cutfuse.epilogue.ties import ties_are_halved
from cutfuse.epilogue.types import INPUTS, ValueType, refuse_unknown_type


@composes("torch.isnan")
def isnan(input: Any) -> Any:
    """a != a"""
    return input != input


@composes("torch.isinf")
def isinf(input: Any) -> Any:
    """|a| == inf"""
    return torch.abs(input) == math.inf


@composes("torch.isfinite")
def isfinite(input: Any) -> Any:
    """|a| < inf"""
    return torch.abs(input) < math.inf


@composes("torch.isposinf")
def isposinf(input: Any) -> Any:
    """a == inf"""
    return input == math.inf


@composes("torch.isneginf")
def isneginf(input: Any) -> Any:
    """a == -inf"""
    return input == -math.inf


@composes("torch.signbit")
def signbit(input: Any) -> Any:
    """copysign(1, a) < 0"""
    return torch.copysign(to_symbolic(1.0), input) < 0


@composes("torch.isclose")
def isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """a == b, or a finite |a - b| <= atol + rtol * |b|"""
    difference = torch.abs(input - other)
    close = (difference <= torch.abs(rtol * to_symbolic(other)) + atol) & (difference < math.inf) | (input == other)
    return close | (isnan(input) & isnan(other)) if equal_nan else close


@composes("torch.logical_xor")
def logical_xor(input: Any, other: Any) -> Any:
    """(a != 0) != (b != 0)"""
    return _truth(input) != _truth(other)


def _truth(value: Any) -> Any:
    node = to_expression(value)
    return node if node.is_boolean else node != 0


@composes("torch.nan_to_num")
def nan_to_num(input: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """a where it is finite; infinities become the type's largest and smallest number where none is given"""
    # What is replaced has no derivative. PyTorch multiplies by 0 there, which is NaN under an infinite derivative.
    if input.is_boolean:
        return input
    high = torch.finfo(input.dtype).max if posinf is None else to_number(posinf, "posinf of nan_to_num")
    low = torch.finfo(input.dtype).min if neginf is None else to_number(neginf, "neginf of nan_to_num")
    finite = torch.where(input == math.inf, high, torch.where(input == -math.inf, low, input))
    return torch.where(isnan(input), 0.0 if nan is None else to_number(nan, "nan of nan_to_num"), finite)


@composes("torch.tan")
def tan(input: Any) -> Any:
    """sin(a) / cos(a)"""
    return torch.sin(input) / torch.cos(input)


@composes("torch.sinc")
def sinc(input: Any) -> Any:
    """sin(pi * a) / (pi * a), and 1 at 0"""
    at_zero = input == 0
    angle = torch.where(at_zero, 1.0, input * math.pi)  # the quotient has no 0 / 0 that a derivative could meet
    return torch.where(at_zero, 1.0, torch.sin(angle) / angle)


@composes("torch.deg2rad")
def deg2rad(input: Any) -> Any:
    """a * pi / 180"""
    return input * (math.pi / 180)


@composes("torch.rad2deg")
def rad2deg(input: Any) -> Any:
    """a * 180 / pi"""
    return input * (180 / math.pi)


@composes("torch.frac")
def frac(input: Any) -> Any:
    """a - trunc(a)"""
    return input - torch.trunc(input)


@composes("torch.angle")
def angle(input: Any) -> Any:
    """pi if a < 0 else 0"""
    zero = torch.sign(input) * 0.0  # of the input's type, which two numbers would not have
    return torch.where(isnan(input), math.nan, torch.where(input < 0, math.pi, zero))


@composes("torch.real", "torch.conj", "torch.conj_physical", "torch.resolve_conj", "torch.resolve_neg")
def real(input: Any) -> Any:
    """a"""
    return input


@composes("torch.heaviside")
def heaviside(input: Any, values: Any) -> Any:
    """0 below 0, 1 above, and values at 0. PyTorch has no derivative of it; here that of input is 0"""
    # Each number beside a value, whose type the choice then has.
    return torch.where(input > 0, 1.0, torch.where(input == 0, to_symbolic(values), 0.0))


@composes("torch.round")
def round(input: Any, *, decimals: int | None = None) -> Any:
    """a rounded to so many decimals, ties to even; negative decimals count before the point"""
    if decimals is None:
        return NotImplemented
    scale = 10.0 ** abs(to_number(decimals, "decimals of round"))
    if decimals == 0:
        return torch.round(input)
    return torch.round(input * scale) / scale if decimals > 0 else torch.round(input / scale) * scale


@composes("torch.fmax")
def fmax(input: Any, other: Any) -> Any:
    """max(a, b), and the other one where one is NaN"""
    if ties_are_halved():
        return _unless_nan(torch.maximum, input, other)
    return torch.where((input >= other) | isnan(other), input, other)


@composes("torch.fmin")
def fmin(input: Any, other: Any) -> Any:
    """min(a, b), and the other one where one is NaN"""
    if ties_are_halved():
        return _unless_nan(torch.minimum, input, other)
    return torch.where((input <= other) | isnan(other), input, other)


def _unless_nan(choose: Callable[..., Any], a: Any, b: Any) -> Any:
    chosen = choose(to_expression(a), to_expression(b))
    return torch.where(isnan(b), a, torch.where(isnan(a), b, chosen))


@composes("torch.logaddexp")
def logaddexp(input: Any, other: Any) -> Any:
    """ln(exp(a) + exp(b)), without overflow"""
    return _log_of_sum(input, other, torch.exp, 1.0)


@composes("torch.logaddexp2")
def logaddexp2(input: Any, other: Any) -> Any:
    """log2(2 ** a + 2 ** b), without overflow"""
    return _log_of_sum(input, other, torch.exp2, math.log(2))


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


@composes("torch.ldexp")
def ldexp(input: Any, other: Any) -> Any:
    """a * 2 ** b"""
    return input * torch.exp2(to_symbolic(other))


@composes("torch.special.ndtr")
def ndtr(input: Any) -> Any:
    """erfc(-a / sqrt(2)) / 2"""
    return 0.5 * torch.erfc(input * -math.sqrt(0.5))


@composes("torch.zeros_like")
def zeros_like(input: Expr, *, dtype: Any = None, requires_grad: bool = False) -> Expr:
    """0"""
    return full_like(input, 0.0, dtype=dtype, requires_grad=requires_grad)


@composes("torch.ones_like")
def ones_like(input: Expr, *, dtype: Any = None, requires_grad: bool = False) -> Expr:
    """1"""
    return full_like(input, 1.0, dtype=dtype, requires_grad=requires_grad)


@composes("torch.full_like")
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
