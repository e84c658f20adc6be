"""Who runs a workload: PyTorch's ways, cutfuse's, and what bounds a chain behind a product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import specialized
from bench.workloads import Run, Workload

# The same kernels as mode "max-autotune" without its CUDA graphs. With graphs each launch first copies its inputs to
# fixed addresses (6.4 GB for the sigmoid), and the host time that graphs save is in no contender's figure.
MAX_AUTOTUNE_MODE = "max-autotune-no-cudagraphs"

MM, EAGER, COMPILE, AUTOTUNE = "mm", "eager", "compile", "max-autotune"
FUSED, KEPT = "cutfuse", "cutfuse-kept"
INTERPRETED, SPECIALIZED = "interpreted", "specialized"
# What bounds a chain behind a product, where a target names it: the chain alone over z, and the product alone.
POINTWISE, PRODUCT = "pointwise", "product"
CUTFUSE = (FUSED, KEPT, INTERPRETED, SPECIALIZED)
COMPILERS = (COMPILE, AUTOTUNE)


def bare_product(workload: Workload) -> Run | None:
    """`torch.mm` of the product alone: what cuBLAS takes before anything follows."""
    if workload.product is None or workload.product_reference is None:
        return None
    x, weight = workload.product
    return Run(lambda: torch.mm(x, weight.t()), workload.product_reference)


def eager(workload: Workload) -> Run:
    """The plain PyTorch code."""
    return Run(lambda: workload.eager(*workload.arguments), workload.reference)


def compiled(workload: Workload, mode: str | None = None) -> Run:
    """The plain PyTorch code under torch.compile, compiled for these sizes by the first call."""
    function = torch.compile(workload.eager, fullgraph=True, dynamic=False, mode=mode)

    def launch() -> Tensor:
        return function(*workload.arguments)

    return Run(launch, workload.reference)


def max_autotuned(workload: Workload) -> Run:
    """torch.compile with kernels chosen by measuring."""
    # Its tables of candidates would fill the screen.
    torch._inductor.config.autotune_num_choices_displayed = 0
    return compiled(workload, MAX_AUTOTUNE_MODE)


def fused(workload: Workload) -> Run:
    """cutfuse's public function or drop-in module."""
    return Run(lambda: workload.fused(*workload.arguments), workload.reference, workload.explain)


def fused_with_kept_planes(workload: Workload) -> Run | None:
    """The same with a prepared weight, which keeps its planes."""
    return None if workload.kept is None else fused(workload.kept)


def in_mode(mode: str) -> Callable[[Workload], Run | None]:
    """cutfuse's call in a mode of specialization."""

    def prepare(workload: Workload) -> Run | None:
        if workload.in_mode is None:
            return None
        return Run(workload.in_mode(mode), workload.reference, specialized.in_mode(mode, workload.explain))

    return prepare


@dataclass(frozen=True)
class Contender:
    """`prepare` gives the call for a workload, or None where the contender has nothing to run."""

    name: str
    label: str
    prepare: Callable[[Workload], Run | None]


def slow_compilers(is_cuda: bool, is_quick: bool) -> tuple[str, ...]:
    """Those that take too long on a CPU, or in a quick run."""
    return () if is_cuda and not is_quick else (AUTOTUNE,) if is_cuda else COMPILERS


def extra(name: str) -> Callable[[Workload], Run | None]:
    """What a workload adds under that name."""
    return lambda workload: workload.extras.get(name)


# In the tables' order.
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(MM, "torch.mm", bare_product),
        Contender(EAGER, "eager", eager),
        Contender(COMPILE, "torch.compile", compiled),
        Contender(AUTOTUNE, "max-autotune", max_autotuned),
        Contender(FUSED, "cutfuse", fused),
        Contender(KEPT, "cutfuse, planes kept", fused_with_kept_planes),
        Contender(INTERPRETED, "interpreted", in_mode(specialized.INTERPRETED)),
        Contender(SPECIALIZED, "specialized", in_mode(specialized.SPECIALIZED)),
        Contender(POINTWISE, "pointwise alone", extra(POINTWISE)),
        Contender(PRODUCT, "product alone", extra(PRODUCT)),
    )
}


def run_of(contender: Contender, workload: Workload) -> Run | None:
    """The contender's call: the workload's own, where it has one of that name."""
    return workload.extras.get(contender.name) or contender.prepare(workload)
