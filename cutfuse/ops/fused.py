"""A linear layer by one fused kernel or by cuBLAS, as its plan says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..precision import SPLIT_MODES, allows_tf32, autocast_dtype, product_mode
from .device import NOT_CUDA, device_facts
from .linear_plan import LinearArguments, first_scheme, plan_linear, precision_of, why_no_kernels
from .planes import Planes

if TYPE_CHECKING:
    from .._C import Alternative, LinearPlan

KEEPS = "the weight's planes are kept by cutfuse.prepare"

_SETTING = threading.Lock()


def plan_call(arguments: LinearArguments, kept: Planes | None = None, captured_mode: str = "") -> LinearPlan:
    """The plan of a call. `kept`: the weight's planes, of which it may have no use."""
    precision = precision_of(arguments, captured_mode)
    has_planes = kept is not None and precision in SPLIT_MODES and kept.scheme == first_scheme(precision)
    return plan_linear(arguments, precision, has_planes)


def explain_fused(arguments: LinearArguments, kept: Planes | None = None) -> tuple[str | None, list[str]]:
    """The kernel and configuration that a call would launch (None for none), and the reasons."""
    if device_facts(arguments.x.device) == NOT_CUDA:
        return None, [why_no_kernels(arguments.x.device)]
    plan = plan_call(arguments, kept)
    *kernels, cublas = plan.alternatives
    runnable = [kernel for kernel in kernels if not kernel.rejection]
    if plan.ruled_out:
        return None, [plan.ruled_out]
    if not runnable:
        return None, sorted({f"{kernel.name}: {kernel.rejection}" for kernel in kernels})
    explain = _explain_planes if precision_of(arguments) in SPLIT_MODES else _explain_direct
    return explain(plan, runnable, cublas)


def _explain_direct(plan: LinearPlan, runnable: list[Alternative], cublas: Alternative) -> tuple[str | None, list[str]]:
    unfused, best, *others = (f"{way.name}: {_predicted(way)}" for way in (cublas, *runnable[:4]))
    if not plan.is_fused:
        return None, [unfused, best, *others]
    (kernel,) = (launch.kernel for launch in plan.launches if isinstance(launch, native.core.FusedProduct))
    order = "M" if kernel.raster_along_m else "N"
    name = f"{kernel.name}, tiles along {order} first, swizzle {kernel.swizzle}: {_predicted(runnable[0])}"
    return name, [*([cublas.rejection] if cublas.rejection else []), unfused, *others]


def _explain_planes(plan: LinearPlan, runnable: list[Alternative], cublas: Alternative) -> tuple[str | None, list[str]]:
    best = runnable[0]
    slices = f", {best.slices} slices of K" if best.slices > 1 else ""
    predicted = f"{best.name}{slices} with its splitting passes: {_predicted(best)}"
    ieee = f"{cublas.name}: {_predicted(cublas)}"
    if not plan.is_fused:
        return None, [ieee, predicted]
    products = [launch for launch in plan.launches if isinstance(launch, native.core.FusedProduct)]
    weights = "the weight is split by a pass of its own"
    if plan.reads_weight_planes:
        weights = KEEPS
    elif products[0].weight_flags.bytes:
        weights = "the weight is split on its way into the product"
    others = [
        f"guarded: {product.kernel.name} runs in its place where split3 would lose accuracy" for product in products[1:]
    ]
    return predicted, [ieee, weights, *others]


def _predicted(alternative: Alternative) -> str:
    return f"{alternative.microseconds:.1f} us predicted"


def cublas_linear(x: Tensor, weight: Tensor, bias: Tensor | None, captured_mode: str = "") -> Tensor:
    """`x @ weight.T + bias` by PyTorch, in the precision that is asked for where the product is one of fp32."""
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    if autocast_dtype(x.device.type) is not None:  # a backward pass under autocast of a forward outside of it
        with torch.autocast(x.device.type, enabled=False):
            return cublas_linear(x, weight, bias, captured_mode)
    wants_tf32 = product_mode(captured_mode) == "tf32"
    if wants_tf32 == allows_tf32():
        return F.linear(x, weight, bias)
    with _tf32_allowed(wants_tf32):
        return F.linear(x, weight, bias)


@contextlib.contextmanager
def _tf32_allowed(allowed: bool) -> Iterator[None]:
    """PyTorch's own setting, which is the process's, changed for as long as one product takes to launch."""
    settings = torch.backends.cuda.matmul
    with _SETTING:
        if not hasattr(settings, "fp32_precision"):  # torch 2.8
            before, settings.allow_tf32 = torch.get_float32_matmul_precision(), allowed
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)  # allow_tf32 would make "high" of "medium"
            return
        before, settings.fp32_precision = settings.fp32_precision, "tf32" if allowed else "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = "none"  # what it inherits, which may be what it was
            if settings.fp32_precision != before:
                settings.fp32_precision = before
