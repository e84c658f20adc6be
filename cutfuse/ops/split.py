"""Products of fp32 matrices over planes of 16-bit parts: which kernel takes them, and the guard between the two plans.

Guarded, split3 runs unless its operands' flags say that it would lose accuracy, and split6 otherwise. The device
decides: both are launched, and one returns at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..precision import GUARDED
from .device import multiprocessors, on_device, stream_of
from .gemm import ALIGNMENT, Plan, Result, plan_planes
from .planes import SPLIT3, SPLIT6, flag_addresses, keeps_planes, note_weight, pitch_of, split, weight_planes

ALWAYS, IF_CLEAR, IF_TRIPPED = range(3)
CONVERT3, CONVERT6 = 13, 16  # split3 and split6, with the weight split on its way in
_CONVERTING = {SPLIT3: CONVERT3, SPLIT6: CONVERT6}
# What launching the plan that does not run takes, in microseconds.
_GUARD = 5.0
# The part of cuBLAS's time that "guarded" has to be predicted to take: the predictions' own error is about 10%.
_ADVANTAGE = 0.9
_PLANS = {"split3": (SPLIT3,), "split6": (SPLIT6,), GUARDED: (SPLIT3, SPLIT6)}


class Multiplication(NamedTuple):
    """One product over planes."""

    planes: int  # SPLIT3 or SPLIT6
    converts: bool  # whether the weight is split on its way into the product
    plan: Plan
    microseconds: float  # predicted, with the passes that split x and the weight

    @property
    def kernel(self) -> Any:  # _C.GemmCandidate
        return self.plan.candidates[0]


class SplitPlan(NamedTuple):
    """How a mode multiplies: first what runs as a rule, then what runs in its place where the guard trips."""

    multiplications: tuple[Multiplication, ...]
    keeps: bool  # whether the weight's planes are kept between calls
    mode: str

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


def plan_split(result: Result, mode: str, may_keep: bool = True) -> SplitPlan | str:
    """How `mode` multiplies; why it cannot, where no kernel takes the problem."""
    first, *fallback = _PLANS[mode]
    keeps = may_keep and keeps_planes(result.weight, first)
    multiplications = [_fastest(result, first, keeps)]
    # What seldom runs is not worth the memory of the weight's planes on every call.
    multiplications += [plan_multiplication(result, planes, _fits_copies(result.weight)) for planes in fallback]
    for multiplication in multiplications:
        if not multiplication.plan.candidates:
            return multiplication.plan.rejections[0]
    return SplitPlan(tuple(multiplications), keeps and not multiplications[0].converts, mode)


def _fastest(result: Result, planes: int, has_planes: bool) -> Multiplication:
    """The faster one of splitting the weight first and on its way in; to have its planes already costs nothing."""
    weight = result.weight
    first = plan_multiplication(result, planes, False)
    if not has_planes:
        weight_pass = native.module().split_microseconds(*weight.shape)
        first = first._replace(microseconds=first.microseconds + weight_pass)
    if not _fits_copies(weight):
        return first
    return min(first, plan_multiplication(result, planes, True), key=lambda option: option.microseconds)


def plan_multiplication(result: Result, planes: int, converts: bool) -> Multiplication:
    """A product over planes of x, and of the weight unless it `converts` them; splitting the weight is not counted."""
    plan = plan_product(result, _CONVERTING[planes] if converts else planes)
    microseconds = native.module().split_microseconds(*result.x.shape)
    if plan.candidates:
        microseconds += plan.candidates[0].microseconds
    return Multiplication(planes, converts, plan, microseconds)


def plan_product(result: Result, product: int) -> Plan:
    """The kernels of one product over planes: SPLIT3, SPLIT6, CONVERT3 or CONVERT6."""
    weight, pitch = result.weight, pitch_of(result.x.shape[1])
    converts = product in _CONVERTING.values()
    weight_pitch = weight.stride(0) if converts and weight.shape[0] > 1 else pitch
    return plan_planes(result, pitch, weight_pitch, product)


def _fits_copies(weight: Tensor) -> bool:
    """Whether the copy engine takes the weight as it lies in memory."""
    rows, columns = weight.shape
    if weight.data_ptr() % ALIGNMENT or (columns > 1 and weight.stride(1) != 1):
        return False
    pitch = weight.stride(0)
    return rows == 1 or (pitch >= columns and pitch * weight.element_size() % ALIGNMENT == 0)


def run_split(result: Result, mode: str, may_keep: bool = True) -> Tensor | None:
    """The result in fp32, of operands of any strides; None where cuBLAS is to run."""
    plan = plan_split(result, mode, may_keep)
    if isinstance(plan, str):
        return None
    if not plan.is_chosen:
        if may_keep:  # with its planes the weight's product may be the faster one
            note_weight(result.weight)
        return None
    return launch_split(plan, result, may_keep)


def launch_split(plan: SplitPlan, result: Result, may_keep: bool = True) -> Tensor:
    """Splits the operands and runs the plan's first kernels."""
    bias = result.bias
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % ALIGNMENT):
        result = result._replace(bias=bias.clone(memory_format=torch.contiguous_format))
    y, partials = result.allocate(plan.first.kernel.tile_n)
    arguments = result.epilogue_arguments(y, partials)
    guard: list[Tensor] = []
    for multiplication in plan.multiplications:
        guard = _launch(multiplication, plan, result, guard, may_keep, arguments)
    result.finalize(y, partials)
    return y


def _launch(
    multiplication: Multiplication,
    plan: SplitPlan,
    result: Result,
    guard: list[Tensor],
    may_keep: bool,
    arguments: tuple[Any, ...],
) -> list[Tensor]:
    """Launches one product; `guard`, flags of operands, decides on the device whether the plan's second runs.

    Returns the guard for the one after it.
    """
    x, weight, index = result.x, result.weight, result.x.device.index
    is_first = multiplication is plan.first
    run = IF_TRIPPED
    if is_first:
        run = IF_CLEAR if len(plan.multiplications) > 1 else ALWAYS
    problem, kernel = multiplication.plan.problem, multiplication.kernel
    slices = _slices(kernel, result)
    x_planes = split(x, multiplication.planes, guard, None if slices is None else slices[1])
    if multiplication.converts:
        if may_keep and is_first:
            note_weight(weight)
        flags = torch.empty(multiprocessors(index), dtype=torch.int32, device=x.device)
        pitch = weight.stride(0) if weight.shape[0] > 1 else pitch_of(weight.shape[1])
        source: tuple[int, ...] = (weight.data_ptr(), pitch, weight.shape[1], *flag_addresses([flags])[0])
        launch = native.module().gemm_convert
    else:
        keeps = may_keep and is_first
        weights = weight_planes(weight, multiplication.planes) if keeps else split(weight, multiplication.planes, guard)
        flags, source = weights.flags, weights.addresses
        launch = native.module().gemm_planes
    # What the first product reads is known before it runs; what it finds of a weight that it splits, after.
    known = [x_planes.flags] if multiplication.converts else [x_planes.flags, flags]
    addresses = (0, 0) if slices is None else (slices[0].data_ptr(), slices[1].data_ptr())
    with on_device(index):
        launch(
            stream_of(index),
            problem,
            kernel,
            x_planes.addresses,
            source,
            addresses,
            flag_addresses(known if is_first else guard),
            run,
            *arguments,
        )
    return [x_planes.flags, flags]


def _slices(kernel: Any, result: Result) -> tuple[Tensor, Tensor] | None:
    """Memory for the sums and arrivals of the kernel's slices of K, None where it has one."""
    if kernel.slices == 1:
        return None
    (m, n), device = result.shape, result.x.device
    tiles = -(-m // kernel.tile_m) * -(-n // kernel.tile_n)
    sums = torch.empty((tiles, kernel.slices, kernel.tile_m, kernel.tile_n), device=device)
    return sums, torch.empty(tiles, dtype=torch.int32, device=device)


def explain_split(result: Result, mode: str) -> tuple[str | None, list[str]]:
    """The kernels that `run_split` would launch (None for none), and why."""
    plan = plan_split(result, mode)
    if isinstance(plan, str):
        return None, [plan]
    kernel = plan.first.kernel
    slices = f", {kernel.slices} slices of K" if kernel.slices > 1 else ""
    predicted = f"{kernel.name}{slices} with its splitting passes: {plan.microseconds:.1f} us predicted"
    ieee = f"cuBLAS in fp32 and one more kernel: {plan.first.plan.unfused_microseconds:.1f} us predicted"
    if not plan.is_chosen:
        return None, [ieee, predicted]
    weights = "the weight is split by a pass of its own"
    if plan.first.converts:
        weights = "the weight is split on its way into the product"
    elif plan.keeps:
        weights = "the weight's planes are kept between calls"
    reasons = [ieee, weights]
    if len(plan.multiplications) > 1:
        other = plan.multiplications[1].kernel.name
        reasons.append(f"guarded: {other} runs in its place where split3 would lose accuracy")
    return predicted, reasons
