"""Random chains of the functions that the other tests name, random tensors for them, and how far a value may be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from test_epilogue_functions import CHAINS, FUNCTIONS, NOT_DIFFERENTIABLE, count_arguments
from test_epilogue_language import LANGUAGE
from test_epilogue_types import FLOATS, INTEGERS, MIXED, values_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch_answers import SPECIAL

from cutfuse.epilogue import op_table

Function = Callable[..., Tensor]
Op = type(op_table().ops[0])

NUMBERS = (0.5, -1.5, 3.0, 0.0, -0.0, 0.1, 2, -1, True, math.inf, math.nan)
PARAMETERS = (0.25, 1.0, -0.5, 2.0, 0.0)


def call_op(op: Op, *arguments: Any, parameters: Sequence[float] = ()) -> Tensor:
    """The op by its operator where it has one. Conditions become comparisons, parameters left out their defaults."""
    if op.operator is not None:
        return op.operator(*arguments)
    given = [item > 0 if name == "condition" else item for name, item in zip(op.tensors, arguments, strict=True)]
    defaults = [default for _, default in op.parameters]
    return op.compose(given, [*parameters[: len(defaults)], *defaults[len(parameters) :]])


CASTS: dict[str, tuple[Function, int]] = {
    "float": (lambda z: z.float(), 1),
    "half": (lambda z: z.half(), 1),
    "bfloat16": (lambda z: z.to(torch.bfloat16), 1),
    "double": (lambda z: z.double(), 1),
    "bool": (lambda z: z.bool(), 1),
    "to_type": (lambda z, r: z.to(r.dtype), 2),
    "type_as": (lambda z, r: z.type_as(r), 2),
    "finfo": (lambda z: z * torch.finfo(z.dtype).eps, 1),
}
OPS = {f"op.{op.name}": (partial(call_op, op), op.arity) for op in op_table().ops if not op.path.startswith("torch.T")}
WRITTEN = {f"language.{name}": (fn, 1 + count) for name, (fn, count) in LANGUAGE.items()}
WRITTEN |= {
    f"function.{name}": (fn, count_arguments(fn)) for name, fn in (FUNCTIONS | CHAINS | NOT_DIFFERENTIABLE).items()
}
TYPED = {f"mixed.{name}": (fn, 3) for name, fn in MIXED.items()}
TYPED |= {f"cast.{name}": cast for name, cast in CASTS.items()}
POOL: dict[str, tuple[Function, int]] = OPS | WRITTEN | TYPED


@dataclass(frozen=True)
class Step:
    """A function of the pool on earlier values, counted backwards from the latest, and on at most one number."""

    name: str
    picks: tuple[int, ...]
    number: tuple[int, float] | None  # which argument it takes the place of, and what it is
    parameters: tuple[float, ...]  # of an op of the table

    def __call__(self, values: Sequence[Any]) -> Any:
        fn, _ = POOL[self.name]
        arguments = [values[-1 - pick % len(values)] for pick in self.picks]
        if self.number is not None and len(arguments) > 1:
            arguments[self.number[0] % len(arguments)] = self.number[1]
        return fn(*arguments, parameters=self.parameters) if self.name in OPS else fn(*arguments)


@dataclass(frozen=True)
class Chain:
    """A callable in steps, of symbolic values as of tensors."""

    steps: tuple[Step, ...]

    def __call__(self, z: Any, *operands: Any) -> Any:
        values = [*operands, z]
        for step in self.steps:
            values.append(step(values))
        return values[-1]


@st.composite
def chains(draw: Callable, pool: Sequence[str] = tuple(POOL), longest: int = 4) -> Chain:
    # A kind first: the pool has more functions of one kind than of others.
    kinds: dict[str, list[str]] = {}
    for name in pool:
        kinds.setdefault(name.partition(".")[0], []).append(name)
    steps = []
    for _ in range(draw(st.integers(1, longest))):
        name = draw(st.sampled_from(sorted(kinds)).flatmap(lambda kind: st.sampled_from(kinds[kind])))
        number = st.none() | st.none() | st.tuples(st.integers(0, 2), st.sampled_from(NUMBERS))
        parameters = st.just(()) | st.lists(st.sampled_from(PARAMETERS), max_size=3).map(tuple)
        picks = st.tuples(*[st.integers(0, 4)] * POOL[name][1])
        steps.append(Step(name, draw(picks), draw(number), draw(parameters) if name in OPS else ()))
    return Chain(tuple(steps))


@dataclass(frozen=True)
class Source:
    """A tensor to be: its type, its shape, and the seed of its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    has_special: bool = True

    def make(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        size = math.prod(self.shape)
        if not self.dtype.is_floating_point:
            return values_of(self.dtype, size, generator).reshape(self.shape)
        normal = torch.randn(size, generator=generator, dtype=torch.float64) * 2
        if self.has_special:
            special = torch.tensor(SPECIAL, dtype=torch.float64)
            chosen = special[torch.randint(len(SPECIAL), (size,), generator=generator)]
            normal = torch.where(torch.rand(size, generator=generator) < 0.6, chosen, normal)
        narrow = torch.float32 if self.dtype == torch.float64 else self.dtype
        return normal.to(narrow).to(self.dtype).reshape(self.shape)


def sources(
    dtypes: Sequence[torch.dtype] = (torch.bool, *INTEGERS, *FLOATS),
    shapes: Sequence[tuple[int, ...]] = ((64,), ()),
    has_special: bool = True,
) -> st.SearchStrategy[Source]:
    values = st.just(has_special)
    return st.builds(Source, st.sampled_from(dtypes), st.sampled_from(shapes), st.integers(0, 2**20), values)


class Noise(TorchDispatchMode):
    """Rounds every operation otherwise: a relative error of `size` roundings wherever the exact result is rounded.

    What leaves the range of the type by rounding alone becomes NaN or stays finite. Rounding is to the result's type,
    and from fp64 to `narrow` where that is given. In fp64 the short numbers count as exact.
    """

    def __init__(self, seed: int, size: float, narrow: torch.dtype | None = None) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._size = size
        self._lost_is_nan = seed % 2 == 0
        self._narrow = narrow

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if func._schema.returns and func._schema.returns[0].alias_info is not None:
            return results
        if isinstance(results, Tensor) and not results.is_floating_point():
            return results
        if func is torch.ops.aten._to_copy.default:
            exact = args[0].double()
        else:
            wide_args, wide_kwargs = tree_map_only(Tensor, _widen, (args, kwargs))
            exact = func(*wide_args, **wide_kwargs)
        if isinstance(results, tuple):
            return tuple(map(self._round, results, exact))
        return self._round(results, exact)

    def _round(self, result: Any, exact: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        exact = exact.double()
        dtype = self._narrow if self._narrow is not None and result.dtype == torch.float64 else result.dtype
        rounded = exact.to(torch.float32 if dtype == torch.float64 else dtype).double()
        info = torch.finfo(dtype)
        errors = torch.randn(exact.shape, generator=self._generator, dtype=torch.float64) * self._size
        step = 0.0 if dtype == torch.float64 else info.tiny * info.eps
        noisy = torch.where(rounded == exact, exact, exact * (1 + info.eps * errors) + step * errors)
        if dtype != torch.float64:
            lost = (rounded.isinf() != exact.isinf()) | ((rounded == 0) != (exact == 0))
            inside = torch.copysign(exact.abs().clamp(step, info.max), exact)
            noisy = torch.where(lost, torch.full_like(exact, math.nan) if self._lost_is_nan else inside, noisy)
        return noisy.to(result.dtype)


def _widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.double()


class Scattered(TorchDispatchMode):
    """Leaves gaps between the elements of every result, so that no loop over it is vectorised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func._schema.returns and func._schema.returns[0].alias_info is not None:
            return results
        return tree_map_only(Tensor, scatter, results)


def scatter(tensor: Tensor) -> Tensor:
    """The tensor with gaps between its elements, so that PyTorch's loops are not vectorised."""
    return torch.stack([tensor, tensor], -1)[..., 0] if tensor.dim() else tensor


def _in_fp32(reference: Callable[..., Tensor], tensors: Sequence[Tensor], otherwise: Tensor) -> Tensor:
    """The reference of the 16-bit tensors in fp32, where it takes them."""
    try:
        widened = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]
        return reference(*widened).expand(otherwise.shape)
    except (RuntimeError, TypeError):
        return otherwise


def _in_fp64(reference: Callable[..., Tensor], tensors: Sequence[Tensor], otherwise: Tensor) -> Tensor:
    """The reference of the fp32 tensors in fp64, where it takes them: functions such as gelu lose digits inside."""
    try:
        widened = [t.double() if t.dtype == torch.float32 else t for t in tensors]
        return reference(*widened).double().expand(otherwise.shape)
    except (RuntimeError, TypeError):
        return otherwise


def find_wrong(
    actual: Tensor,
    reference: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    narrow: torch.dtype | None = None,
    eager: Tensor | None = None,
) -> Tensor:
    """Where `actual` is no result of the reference, however its operations are rounded.

    Elements that rounding alone makes finite or not are not known, nor are those that PyTorch's two loops, vectorised
    and not, compute differently, or that are NaN in fp32 only or in a 16-bit type only, as torch's gelu of infinity.
    `eager` is what PyTorch has in another type: it may be as wrong inside of a function. What is as close to the
    reference in fp64 is right too.
    """
    expected = reference(*tensors).double().expand(actual.shape)
    got = actual.double()
    dtype = narrow if narrow is not None and actual.dtype == torch.float64 else actual.dtype
    allowed = torch.zeros_like(got)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        allowed = 4 * info.eps * expected.abs().nan_to_num(0, 0, 0) + 2 * info.tiny * info.eps
        # Beside a zero, and where PyTorch rounds a tail to 0 as in ndtr, an error is one of numbers near 1.
        allowed += min(info.eps, torch.finfo(torch.float32).eps)
    with Scattered():
        other = reference(*map(scatter, tensors)).double().expand(actual.shape)
    known = torch.isclose(other, expected, rtol=8 * torch.finfo(torch.float16).eps, atol=1e-3, equal_nan=True)
    if eager is not None:
        allowed += 4 * (eager.double() - expected).abs().nan_to_num(0, 0, 0)
        known &= eager.isfinite() | ~expected.isfinite()
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors):
        precise = _in_fp32(reference, tensors, expected).double()
        known &= precise.isnan() == expected.isnan()
        known &= expected.isfinite() | ~got.isfinite()  # a 16-bit type overflows where fp32 does not
        allowed += torch.where(precise.isfinite() & expected.isfinite(), (precise - expected).abs(), 0.0)
    if dtype.is_floating_point and any(tensor.dtype == torch.float32 for tensor in tensors):
        exact = _in_fp64(reference, tensors, expected)
        known &= ~(torch.isclose(got, exact, rtol=4 * torch.finfo(dtype).eps, atol=0) & expected.isfinite())
    # A comparison beside its threshold falls on either side. A few errors show most of these, many show all.
    for seeds in (range(4), range(4, 100)):
        for seed in seeds:
            size = (0.5, 1.0, 2.0, 4.0)[seed // 2 % 4]
            with Noise(seed, size, narrow):
                noisy = reference(*tensors)
            noisy = noisy.double().expand(actual.shape)
            difference = (noisy - expected).abs() / min(size, 1.0)
            same = (noisy == expected) | (noisy.isnan() & expected.isnan())
            known &= same | (noisy.isfinite() & expected.isfinite())
            allowed = torch.maximum(allowed, torch.where(same | difference.isnan(), 0.0, 8 * difference))
        right = (got == expected) | (got.isnan() & expected.isnan()) | ((got - expected).abs() <= allowed)
        wrong = known & ~right
        if not wrong.any():
            break
    return wrong
