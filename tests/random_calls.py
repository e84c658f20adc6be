"""Random chains of the functions that the other tests name, and random tensors for them."""

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
from torch_answers import SPECIAL

from cutfuse.epilogue import op_table

Function = Callable[..., Tensor]
Op = type(op_table().ops[0])

# Of every type, as PyTorch rounds a number to the type of a choice, such as where's, and cutfuse does not.
NUMBERS = (0.5, -1.5, 3.0, 0.0, -0.0, 0.1015625, 2, -1, True, math.inf, math.nan)
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
# Comparisons make the booleans, so that they meet whatever the operands are.
MASKS: dict[str, tuple[Function, int]] = {
    "add": (lambda p, q: (p >= 0) + (q != 1), 2),
    "multiply": (lambda p, q: (p > -1) * (q < 2), 2),
    "exclusive": (lambda p, q: (p > 0) ^ (q > 0) | (p == q), 2),
    "invert": (lambda p: ~(p > 0), 1),
    "choose": (lambda p, q, r: torch.where((p > 0) + (q > 0), q, r), 3),
}
OPS = {f"op.{op.name}": (partial(call_op, op), op.arity) for op in op_table().ops if not op.path.startswith("torch.T")}
WRITTEN = {f"language.{name}": (fn, 1 + count) for name, (fn, count) in LANGUAGE.items()}
WRITTEN |= {
    f"function.{name}": (fn, count_arguments(fn)) for name, fn in (FUNCTIONS | CHAINS | NOT_DIFFERENTIABLE).items()
}
TYPED = {f"mixed.{name}": (fn, 3) for name, fn in MIXED.items()}
TYPED |= {f"cast.{name}": cast for name, cast in CASTS.items()}
TYPED |= {f"mask.{name}": mask for name, mask in MASKS.items()}
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
    scale: float = 2.0

    def make(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        size = math.prod(self.shape)
        if not self.dtype.is_floating_point:
            return values_of(self.dtype, size, generator).reshape(self.shape)
        normal = torch.randn(size, generator=generator, dtype=torch.float64) * self.scale
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
    scales: Sequence[float] = (2.0,),
) -> st.SearchStrategy[Source]:
    # A kind first, so that several masks meet: booleans, integers, floating-point types.
    kinds: dict[object, list[torch.dtype]] = {}
    for dtype in dtypes:
        kinds.setdefault("mask" if dtype == torch.bool else dtype.is_floating_point, []).append(dtype)
    dtype = st.sampled_from(list(kinds.values())).flatmap(st.sampled_from)
    shape, number, scale = st.sampled_from(shapes), st.integers(0, 2**20), st.sampled_from(scales)
    return st.builds(Source, dtype, shape, number, st.just(has_special), scale)
