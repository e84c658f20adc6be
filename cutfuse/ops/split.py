"""Products of fp32 matrices over planes of 16-bit parts: which kernel takes them, and the guard between the two plans.

Guarded, split3 runs unless its operands' flags say that it would lose accuracy, and split6 otherwise. The device
decides: both are launched, and one returns at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import native
from ..precision import GUARDED
from .device import multiprocessors, on_device, stream_of
from .gemm import ALIGNMENT, Plan, Result, plan_planes
from .planes import SPLIT3, SPLIT6, keeps_planes, note_weight, pitch_of, split, weight_planes

ALWAYS, IF_CLEAR, IF_TRIPPED = range(3)
CONVERT3 = 13  # split3, with the weight split on its way in
# What launching the plan that does not run takes, in microseconds.
_GUARD = 8.0
_PLANS = {"split3": (SPLIT3,), "split6": (SPLIT6,), GUARDED: (SPLIT3, SPLIT6)}


class SplitPlan(NamedTuple):
    """The kernels of a mode, first the one that runs as a rule, and the predicted time with all passes."""

    plans: tuple[Plan, ...]
    microseconds: float
    converts: bool  # whether the weight is split on its way into the product
    keeps: bool  # whether the weight's planes are kept between calls
    mode: str

    @property
    def is_chosen(self) -> bool:
        """split3 and split6 run wherever kernels take the problem; "guarded" where it is predicted to be faster."""
        return self.mode != GUARDED or self.microseconds <= self.plans[0].unfused_microseconds


def plan_split(result: Result, mode: str, may_keep: bool = True) -> SplitPlan | str:
    """How `mode` multiplies; why it cannot, where no kernel takes the problem."""
    x, weight = result.x, result.weight
    first, *fallback = (plan_product(result, product) for product in _PLANS[mode])
    for plan in (first, *fallback):
        if not plan.candidates:
            return plan.rejections[0]
    split_microseconds = native.module().split_microseconds
    passes = split_microseconds(*x.shape) + (_GUARD if fallback else 0.0)
    keeps = may_keep and keeps_planes(weight, _PLANS[mode][0])
    options = [(first, False, passes + (0.0 if keeps else split_microseconds(*weight.shape)))]
    if _PLANS[mode][0] == SPLIT3 and _fits_copies(weight):
        options.append((plan_product(result, CONVERT3), True, passes))
    plan, converts, passes = min(options, key=lambda option: option[0].candidates[0].microseconds + option[2])
    microseconds = plan.candidates[0].microseconds + passes
    return SplitPlan((plan, *fallback), microseconds, converts, keeps, mode)


def plan_product(result: Result, product: int) -> Plan:
    """The kernels of one product over planes: SPLIT3, SPLIT6 or CONVERT3."""
    weight, pitch = result.weight, pitch_of(result.x.shape[1])
    weight_pitch = weight.stride(0) if product == CONVERT3 and weight.shape[0] > 1 else pitch
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
    return None if isinstance(plan, str) or not plan.is_chosen else launch_split(plan, result, may_keep)


def launch_split(plan: SplitPlan, result: Result, may_keep: bool = True) -> Tensor:
    """Splits the operands and runs the plan's first kernels."""
    x, weight, bias = result.x, result.weight, result.bias
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % ALIGNMENT):
        result = result._replace(bias=bias.clone(memory_format=torch.contiguous_format))
    first, *fallback = plan.plans
    index = x.device.index
    product = _PLANS[plan.mode][0]
    x_planes = split(x, product)
    y, partials = result.allocate(first.candidates[0].tile_n)
    arguments = result.epilogue_arguments(y, partials)
    run = IF_CLEAR if fallback else ALWAYS
    with on_device(index):
        stream, module = stream_of(index), native.module()
        if plan.converts:
            if may_keep:
                note_weight(weight)
            flags = torch.empty(multiprocessors(index), dtype=torch.int32, device=x.device)
            pitch = weight.stride(0) if weight.shape[0] > 1 else pitch_of(weight.shape[1])
            converted = (weight.data_ptr(), pitch, weight.shape[1], flags.data_ptr(), flags.numel())
            guard = [x_planes.guard]
            module.gemm_convert(
                stream, first.problem, first.candidates[0], x_planes.addresses, converted, guard, run, *arguments
            )
            guard = [*guard, (flags.data_ptr(), flags.numel())]
        else:
            weights = weight_planes(weight, product) if may_keep else split(weight, product)
            guard = [x_planes.guard, weights.guard]
            module.gemm_planes(
                stream,
                first.problem,
                first.candidates[0],
                x_planes.addresses,
                weights.addresses,
                guard,
                run,
                *arguments,
            )
        for other in fallback:
            exact = split(x, SPLIT6, guard), split(weight, SPLIT6, guard)
            addresses = [planes.addresses for planes in exact]
            module.gemm_planes(stream, other.problem, other.candidates[0], *addresses, guard, IF_TRIPPED, *arguments)
    result.finalize(y, partials)
    return y


def explain_split(result: Result, mode: str) -> tuple[str | None, list[str]]:
    """The kernels that `run_split` would launch (None for none), and why."""
    plan = plan_split(result, mode)
    if isinstance(plan, str):
        return None, [plan]
    name = plan.plans[0].candidates[0].name
    predicted = f"{name} with its splitting passes: {plan.microseconds:.1f} us predicted"
    ieee = f"cuBLAS in fp32 and one more kernel: {plan.plans[0].unfused_microseconds:.1f} us predicted"
    if not plan.is_chosen:
        return None, [ieee, predicted]
    weights = "the weight is split by a pass of its own"
    if plan.converts:
        weights = "the weight is split on its way into the product"
    elif plan.keeps:
        weights = "the weight's planes are kept between calls"
    reasons = [ieee, weights]
    if len(plan.plans) > 1:
        other = plan.plans[1].candidates[0].name
        reasons.append(f"guarded: {other} runs in its place where split3 would lose accuracy")
    return predicted, reasons
