"""What PTX's arithmetic gives, over arrays of bits: IEEE fp32 with every rounding, comparisons, conversions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
CANONICAL_NAN = np.uint32(0x7FFFFFFF)
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@functools.cache
def size_of(kind: str) -> int:
    """Bytes of a type such as f32."""
    return int(kind[1:]) // 8 if kind != "pred" else 1


def float_of(bits: Array) -> Array:
    return bits.view({2: np.float16, 4: np.float32, 8: np.float64}[bits.dtype.itemsize])


def bits_of(values: Array) -> Array:
    """Of fp32 or fp64 values that arithmetic gave."""
    bits = np.ascontiguousarray(values).view(UNSIGNED[values.dtype.itemsize])
    if values.dtype != np.float32 or not (nan := np.isnan(values)).any():
        return bits
    return np.where(nan, CANONICAL_NAN, bits)


def flushed(values: Array) -> Array:
    subnormal = (np.abs(values) < np.float32(2.0**-126)) & (values != 0)
    return np.where(subnormal, np.copysign(np.float32(0), values), values)


def exact_sum(a: Array, b: Array) -> Array:
    """a + b in fp64, rounded to odd: rounding that once more to fp32 is as if it had been rounded once."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & (total.view(np.uint64) & np.uint64(1) == 0)
    if not inexact.any():
        return total
    return np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def to_single(values: Array, rounding: str) -> Array:
    near = values.astype(np.float32)
    if rounding == "rn":
        return near
    above, below = near > values, near < values
    down = above & {"rm": True, "rp": False, "rz": values > 0}[rounding]
    up = below & {"rm": False, "rp": True, "rz": values < 0}[rounding]
    near = np.where(down, np.nextafter(near, np.float32(-np.inf)), near)
    return np.where(up, np.nextafter(near, np.float32(np.inf)), near)


def extreme(a: Array, b: Array, parts: Sequence[str]) -> Array:
    """min and max: of zeros the positive one is larger, and a number wins over NaN unless .NaN is asked for."""
    largest = parts[0] == "max"
    first = (a > b) | ((a == b) & ~np.signbit(a)) if largest else (a < b) | ((a == b) & np.signbit(a))
    result = np.where(first | np.isnan(b), a, b)
    if "NaN" in parts:
        return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), result)
    return result


APPROXIMATIONS: dict[str, Callable[..., Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1.0 / a,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "div": lambda a, b: a / b,
}

COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b)) if a.dtype.kind == "f" else a != b,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def compare(name: str, a: Array, b: Array) -> Array:
    if name in COMPARISONS:
        return COMPARISONS[name](a, b)
    return COMPARISONS[name[:2]](a, b) | np.isnan(a) | np.isnan(b)  # equ, neu, ltu and so on: true where unordered


def rounded_to_bfloat16(bits: Array) -> Array:
    """Of fp32 bits, to nearest even."""
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(float_of(bits)), np.uint32(0x7FFF), rounded).astype(np.uint16)


def convert(source: Array, to: str, origin: str, modifiers: Sequence[str]) -> Array:
    """cvt between bits of one type and bits of another."""
    if to == "bf16":
        return rounded_to_bfloat16(source)
    if origin == "bf16":
        return source.astype(np.uint32) << np.uint32(16)
    if origin[0] == "f":
        values = float_of(source)
        whole = next((part[:2] for part in modifiers if part.endswith("i")), None)
        if whole is not None:
            values = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}[whole](values)
        if "sat" in modifiers:
            values = np.where(np.isnan(values), np.float32(0), np.clip(values, np.float32(0), np.float32(1)))
        if to[0] == "f":
            return bits_of(values.astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[to]))
        limits = np.iinfo((SIGNED if to[0] == "s" else UNSIGNED)[size_of(to)])
        clipped = np.clip(np.nan_to_num(values.astype(np.float64), nan=0.0), limits.min, limits.max)
        return clipped.astype(limits.dtype).view(UNSIGNED[size_of(to)])
    number = source.view(SIGNED[source.itemsize]) if origin[0] == "s" else source
    if to[0] == "f":
        return bits_of(number.astype({"f32": np.float32, "f64": np.float64}[to]))
    return number.astype(UNSIGNED[size_of(to)])
