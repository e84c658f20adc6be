"""Products of fp32 matrices over planes of 16-bit parts: which kernel takes them, and the guard between the two plans.

Guarded, split3 runs unless its operands' flags say that it would lose accuracy, and split6 otherwise. The device
decides: both are launched, and one returns at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..precision import GUARDED
from .device import multiprocessors, on_device, stream_of
from .gemm import ALIGNMENT, EpilogueArguments, Plan, Result, plan_planes
from .planes import (
    SPLIT3,
    SPLIT6,
    Flags,
    Layout,
    Planes,
    aligned,
    is_transposed,
    layout_of,
    pitch_of,
    write_planes,
)

if TYPE_CHECKING:
    from .._C import GemmCandidate

ALWAYS, IF_CLEAR, IF_TRIPPED = range(3)
CONVERT3, CONVERT6 = 13, 16  # split3 and split6, with the weight split on its way in
_CONVERTING = {SPLIT3: CONVERT3, SPLIT6: CONVERT6}
KEEPS = "the weight's planes are kept by cutfuse.prepare"
# What launching the plan that does not run takes, in microseconds.
_GUARD = 5.0
# The part of cuBLAS's time that "guarded" has to be predicted to take: the predictions' own error is about 10%.
_ADVANTAGE = 0.9
_PLANS = {"split3": (SPLIT3,), "split6": (SPLIT6,), GUARDED: (SPLIT3, SPLIT6)}


class Case(NamedTuple):
    """What the choice of kernels and their memory depend on."""

    m: int
    n: int
    k: int
    x_transposed: bool
    weight_transposed: bool
    weight_pitch: int  # 0 where the copy engine does not take the weight as it lies in memory
    reduction: str
    epilogue_cost: float
    multiprocessors: int

    @staticmethod
    def of(result: Result) -> Case:
        x, weight = result.x, result.weight
        (m, k), n = x.shape, weight.shape[0]
        transposed = is_transposed(x), is_transposed(weight)
        cost, count = result.program.native.cost, multiprocessors(x.device.index)
        return Case(m, n, k, *transposed, _pitch_for_copies(weight), result.reduction, cost, count)


class Multiplication(NamedTuple):
    """One product over planes, and the memory that it takes, in bytes."""

    planes: int  # SPLIT3 or SPLIT6
    converts: bool  # whether the weight is split on its way into the product
    plan: Plan
    microseconds: float  # predicted, with the passes that split x and the weight
    x: Layout
    weight: Layout | None  # None where its planes are not made: it is converted, or they are kept
    weight_pitch: int  # where it is converted
    weight_flags: int  # how many
    tiles: int  # at which slices of K arrive; 0 where K is whole

    @property
    def kernel(self) -> GemmCandidate:
        return self.plan.candidates[0]

    @property
    def sums(self) -> int:
        """Of the slices of K."""
        kernel = self.kernel
        return 4 * self.tiles * kernel.slices * kernel.tile_m * kernel.tile_n

    @property
    def lasting(self) -> int:
        """Of flags, which guard the product after this one, and arrivals."""
        return self.x.flag_bytes + aligned(4 * self.weight_flags) + aligned(4 * self.tiles)

    @property
    def passing(self) -> int:
        """Of planes and sums, which the product after this one may write over."""
        return self.x.nbytes + (0 if self.weight is None else self.weight.nbytes) + self.sums


class SplitPlan(NamedTuple):
    """How a mode multiplies: first what runs as a rule, then what runs in its place where the guard trips."""

    multiplications: tuple[Multiplication, ...]
    keeps: bool  # whether the weight's planes were made before the call
    mode: str
    lasting: int  # bytes
    passing: int

    @staticmethod
    def of(multiplications: Sequence[Multiplication], keeps: bool, mode: str) -> SplitPlan:
        lasting = sum(multiplication.lasting for multiplication in multiplications)
        passing = max(multiplication.passing for multiplication in multiplications)
        return SplitPlan(tuple(multiplications), keeps, mode, lasting, passing)

    @property
    def first(self) -> Multiplication:
        return self.multiplications[0]

    @property
    def microseconds(self) -> float:
        return self.first.microseconds + (_GUARD if len(self.multiplications) > 1 else 0.0)

    @property
    def is_chosen(self) -> bool:
        """split3 and split6 run wherever kernels take the problem; "guarded" where it is predicted to be faster."""
        return self.mode != GUARDED or self.microseconds <= _ADVANTAGE * self.first.plan.unfused_microseconds


def kept_plan(mode: str) -> int:
    """The planes of a weight that are kept for `mode`: SPLIT3 or SPLIT6. What runs in their place seldom splits it."""
    return _PLANS[mode][0]


def plan_split(result: Result, mode: str, kept: Planes | None = None) -> SplitPlan | str:
    """How `mode` multiplies; why it cannot, where no kernel takes the problem. `kept`: the weight's planes."""
    keeps = kept is not None and kept.plan == kept_plan(mode)
    return _plan_case(Case.of(result), mode, keeps)


@functools.lru_cache(maxsize=4096)
def _plan_case(case: Case, mode: str, keeps: bool) -> SplitPlan | str:
    first, *fallback = _PLANS[mode]
    multiplications = [_fastest(case, first, keeps)]
    # What seldom runs is not worth the memory of the weight's planes on every call.
    multiplications += [plan_multiplication(case, planes, case.weight_pitch > 0) for planes in fallback]
    for multiplication in multiplications:
        if not multiplication.plan.candidates:
            return multiplication.plan.rejections[0]
    keeps = keeps and not multiplications[0].converts
    if keeps:
        multiplications[0] = multiplications[0]._replace(weight=None, weight_flags=0)
    return SplitPlan.of(multiplications, keeps, mode)


def _fastest(case: Case, planes: int, has_planes: bool) -> Multiplication:
    """The faster one of splitting the weight first and on its way in; to have its planes already costs nothing."""
    first = plan_multiplication(case, planes, False)
    if not has_planes:
        weight_pass = native.core.split_microseconds(case.n, case.k)
        first = first._replace(microseconds=first.microseconds + weight_pass)
    if not case.weight_pitch:
        return first
    return min(first, plan_multiplication(case, planes, True), key=lambda option: option.microseconds)


def plan_multiplication(case: Case, planes: int, converts: bool) -> Multiplication:
    """A product over planes of x, and of the weight unless it `converts` them; splitting the weight is not counted."""
    m, n, k = case.m, case.n, case.k
    pitch = pitch_of(k)
    plan = plan_planes(
        (m, n, pitch),
        case.weight_pitch if converts else pitch,
        case.reduction,
        case.multiprocessors,
        case.epilogue_cost,
        _CONVERTING[planes] if converts else planes,
    )
    microseconds, tiles = native.core.split_microseconds(m, k), 0
    if plan.candidates:
        kernel = plan.candidates[0]
        microseconds += kernel.microseconds
        tiles = -(-m // kernel.tile_m) * -(-n // kernel.tile_n) if kernel.slices > 1 else 0
    x = layout_of(m, k, planes, case.x_transposed, False)
    if converts:
        flags = case.multiprocessors
        return Multiplication(planes, True, plan, microseconds, x, None, case.weight_pitch, flags, tiles)
    weight = layout_of(n, k, planes, case.weight_transposed, True)
    return Multiplication(planes, False, plan, microseconds, x, weight, 0, weight.flag_count, tiles)


def _pitch_for_copies(weight: Tensor) -> int:
    """Elements from row to row, 0 where the copy engine does not take the weight as it lies in memory."""
    rows, columns = weight.shape
    if weight.data_ptr() % ALIGNMENT or is_transposed(weight):
        return 0
    if rows == 1:
        return pitch_of(columns)
    pitch = weight.stride(0)
    return pitch if pitch >= columns and pitch * weight.element_size() % ALIGNMENT == 0 else 0


def run_split(result: Result, mode: str, kept: Planes | None = None) -> Tensor | None:
    """The result in fp32, of operands of any strides; None where cuBLAS is to run. `kept`: the weight's planes."""
    plan = plan_split(result, mode, kept)
    if isinstance(plan, str) or not plan.is_chosen:
        return None
    return launch_split(plan, result, kept)


def launch_split(plan: SplitPlan, result: Result, kept: Planes | None = None) -> Tensor:
    """Splits the operands and runs the plan's first kernels; `kept` where the plan keeps the weight's planes."""
    bias = result.bias
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % ALIGNMENT):
        result = result._replace(bias=bias.clone(memory_format=torch.contiguous_format))
    y, partials = result.allocate(plan.first.kernel.tile_n)
    launches = _Launches(plan, result, kept, result.epilogue_arguments(y, partials))
    for multiplication in plan.multiplications:
        launches.multiply(multiplication)
    result.finalize(y, partials)
    return y


class _Launches:
    """The launches of one call, over one piece of memory."""

    def __init__(self, plan: SplitPlan, result: Result, kept: Planes | None, epilogue: EpilogueArguments) -> None:
        self.plan = plan
        self.result = result
        self.kept = kept
        self.epilogue = epilogue
        self.memory = torch.empty(plan.lasting + plan.passing, dtype=torch.uint8, device=result.x.device)
        self.lasting = self.memory.data_ptr()
        self.passing = self.lasting + plan.lasting
        self.guard: list[Flags] = []  # flags of operands: on the device they decide whether the plan's second runs

    def multiply(self, multiplication: Multiplication) -> None:
        """Splits x, and the weight unless it is converted or its planes are kept, and launches the product."""
        weight, index, kernel = self.result.weight, self.result.x.device.index, multiplication.kernel
        x = multiplication.x.placed(self.passing, self.lasting)
        weight_flags = self.lasting + multiplication.x.flag_bytes
        arrivals = weight_flags + aligned(4 * multiplication.weight_flags)
        self.lasting += multiplication.lasting
        sums = self.passing + multiplication.x.nbytes
        cleared = arrivals, multiplication.tiles
        write_planes(self.result.x, multiplication.planes, x, is_weight=False, only_if=self.guard, cleared=cleared)
        if multiplication.converts:
            flags, known = (weight_flags, multiplication.weight_flags), [x.flags]
            source: tuple[int, ...] = (weight.data_ptr(), multiplication.weight_pitch, weight.shape[1], *flags)
            launch: Callable[..., None] = native.core.gemm_convert
        else:
            if multiplication.weight is None:
                assert self.kept is not None
                placed = self.kept.placed
            else:
                placed = multiplication.weight.placed(sums, weight_flags)
                sums += multiplication.weight.nbytes
                write_planes(weight, multiplication.planes, placed, is_weight=True, only_if=self.guard)
            flags, known, source = placed.flags, [x.flags, placed.flags], placed.parts
            launch = native.core.gemm_planes
        # What the first product reads is known before it runs; what it finds of a weight that it converts, after.
        is_first = multiplication is self.plan.first
        problem, guard = multiplication.plan.problem, known if is_first else self.guard
        with on_device(index):
            launch(
                stream_of(index),
                problem,
                kernel,
                x.parts,
                source,
                (sums, arrivals),
                guard,
                self._run(is_first),
                *self.epilogue,
            )
        self.guard = [x.flags, flags]

    def _run(self, is_first: bool) -> int:
        """When a product runs: see csrc/gemm/problem.h."""
        if not is_first:
            return IF_TRIPPED
        return IF_CLEAR if len(self.plan.multiplications) > 1 else ALWAYS


def explain_split(result: Result, mode: str, kept: Planes | None = None) -> tuple[str | None, list[str]]:
    """The kernels that `run_split` would launch (None for none), and why."""
    plan = plan_split(result, mode, kept)
    if isinstance(plan, str):
        return None, [plan]
    kernel = plan.first.kernel
    slices = f", {kernel.slices} slices of K" if kernel.slices > 1 else ""
    predicted = f"{kernel.name}{slices} with its splitting passes: {plan.microseconds:.1f} us predicted"
    is_bare = not result.reduces and result.program.native.cost == 0
    cublas = "cuBLAS in fp32" if is_bare else "cuBLAS in fp32 and one more kernel"
    ieee = f"{cublas}: {plan.first.plan.unfused_microseconds:.1f} us predicted"
    if not plan.is_chosen:
        return None, [ieee, predicted]
    weights = "the weight is split by a pass of its own"
    if plan.first.converts:
        weights = "the weight is split on its way into the product"
    elif plan.keeps:
        weights = KEEPS
    reasons = [ieee, weights]
    if len(plan.multiplications) > 1:
        other = plan.multiplications[1].kernel.name
        reasons.append(f"guarded: {other} runs in its place where split3 would lose accuracy")
    return predicted, reasons
