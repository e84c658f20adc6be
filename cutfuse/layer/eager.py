"""Plans of linear layers with the bits of PyTorch's eager mode: cuBLAS's of the product, and those of the functions.

Products of 16-bit types that are not split have cuBLAS's bits mostly, but nothing promises it. So a kernel's product is
compared with cuBLAS's, on random numbers, before it is first planned for such matrices; where they differ, the product
is cuBLAS's own, and a kernel behind it computes the program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..native import address_of
from .call_plans import Planned, general, given_to, linear_call
from .layouts import ALIGNMENT
from .linear_plan import plan_call
from .planner import LinearArguments, plan_linear, precision_of
from .specialize import is_capturing, request
from .training_step import IDENTITY

_same_bits: dict[tuple[Any, ...], bool] = {}


def plan_eager_call(arguments: LinearArguments, shape: Sequence[int]) -> Planned | None:
    """The plan of a layer whose program is eager, of 16-bit matrices without a reduction; `never()` where no kernel
    computes it, and None where none does yet, because it is being compiled or a graph is captured."""
    plan = plan_call(arguments)
    if plan.is_fused:
        is_same = has_cublas_bits(arguments, plan.alternatives[plan.chosen].name)
        if is_same is None:
            return None
        if not is_same:
            plan = plan_linear(arguments, precision_of(arguments), only=plan.alternatives[-1].name)
    planned = linear_call(plan, arguments, shape=shape)
    if not arguments.program.native.has_eager_formulas:
        return planned
    request(planned.epilogues)
    if any(epilogue.is_pending for epilogue in planned.epilogues):
        return None
    are_ready = bool(planned.epilogues) and all(epilogue.is_ready for epilogue in planned.epilogues)
    return planned if are_ready else never()


@functools.lru_cache(maxsize=1)
def never() -> Planned:
    """The plan of calls that no kernel computes."""
    return general()


def has_cublas_bits(arguments: LinearArguments, kernel: str) -> bool | None:
    """Whether a kernel's product of matrices like these has cuBLAS's bits; None while a graph is captured."""
    key = key_of(arguments, kernel)
    found = _same_bits.get(key)
    if found is None and not is_capturing():
        found = _same_bits[key] = _compare(arguments, kernel)
    return found


def known_bits(arguments: LinearArguments, kernel: str) -> bool | None:
    """The same where it has been compared, and None elsewhere."""
    return _same_bits.get(key_of(arguments, kernel))


def key_of(arguments: LinearArguments, kernel: str) -> tuple[Any, ...]:
    x, weight, bias, *_ = arguments
    layouts = [(t.shape, t.stride(), address_of(t) % ALIGNMENT) for t in (x, weight, bias) if t is not None]
    return kernel, x.dtype, x.device, *layouts


@torch.no_grad()
def _compare(arguments: LinearArguments, kernel: str) -> bool:
    """Of memory that begins on cuBLAS's widest boundary, and of memory that begins on the kernels' own alone: cuBLAS
    chooses by that, and a plan serves both."""
    x, weight, bias, *_ = arguments
    generator = torch.Generator(x.device).manual_seed(0)
    for offset in (0, ALIGNMENT):
        own_x, own_weight = (_random_like(t, offset, generator) for t in (x, weight))
        own_bias = None if bias is None else _random_like(bias, offset, generator)
        # A kernel that stores another type stores the product in it, which the program would round.
        product = LinearArguments(own_x, own_weight, own_bias, (), IDENTITY, "none", arguments.out_dtype)
        try:
            plan = plan_linear(product, precision_of(product), only=kernel)
        except ValueError:  # the kernel multiplies below this program alone
            return False
        y: Tensor = linear_call(plan, product).run(*given_to(product))
        if not torch.equal(y.to(x.dtype), F.linear(own_x, own_weight, own_bias)):
            return False
    return True


def _random_like(tensor: Tensor, offset: int, generator: torch.Generator) -> Tensor:
    """Normal numbers in the tensor's layout, so many bytes behind a boundary that is the tensor's own too."""
    first = (offset + address_of(tensor) % ALIGNMENT) // tensor.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(first + extent, dtype=tensor.dtype, device=tensor.device).normal_(generator=generator)
    return storage.as_strided(tensor.shape, tensor.stride(), first)
