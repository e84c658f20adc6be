"""Who runs a workload: PyTorch's ways, cutfuse's, and what bounds a chain behind a product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

import cutfuse
from bench.workloads import Run, Workload, product_reference

# The same kernels as mode "max-autotune" without its CUDA graphs. With graphs each launch first copies its inputs to
# fixed addresses (6.4 GB for the sigmoid), and the host time that graphs save is in no contender's figure.
MAX_AUTOTUNE_MODE = "max-autotune-no-cudagraphs"

MM, EAGER, PYTORCH, COMPILE, AUTOTUNE = "mm", "eager", "pytorch", "compile", "max-autotune"
FUSED, KEPT = "cutfuse", "cutfuse-kept"
INTERPRETED, SPECIALIZED = "interpreted", "specialized"
# What bounds a chain behind a product, where a target names it: the chain alone over z, and the product alone.
POINTWISE, PRODUCT = "pointwise", "product"
CUTFUSE = (FUSED, KEPT, INTERPRETED, SPECIALIZED)
COMPILERS = (COMPILE, AUTOTUNE)


LONGEST_WAIT_S = 120.0  # for what is compiled in the background

T = TypeVar("T")


def in_mode(mode: str, call: Callable[..., T]) -> Callable[..., T]:
    """The call with the process in a mode of specialization: a backward pass runs in another thread than its caller."""

    def run(*arguments: object) -> T:
        before = cutfuse.get_specialization()
        cutfuse.set_specialization(mode)
        try:
            return call(*arguments)
        finally:
            cutfuse.set_specialization(before)

    return run


def bare_product(workload: Workload) -> Run | None:
    """`torch.mm` of the product alone: what cuBLAS takes before anything follows."""
    if workload.product is None:
        return None
    x, weight = workload.product
    return Run(lambda: torch.mm(x, weight.t()), product_reference(x, weight))


def compiled(workload: Workload, mode: str | None = None) -> Run:
    """The plain PyTorch code under torch.compile, compiled for these sizes by the first call."""
    function = torch.compile(workload.eager, fullgraph=True, dynamic=False, mode=mode)
    return Run(partial(function, *workload.arguments), workload.exact)


def max_autotuned(workload: Workload) -> Run:
    """torch.compile with kernels chosen by measuring."""
    # Its tables of candidates would fill the screen.
    torch._inductor.config.autotune_num_choices_displayed = 0
    return compiled(workload, MAX_AUTOTUNE_MODE)


def run_in_mode(mode: str, workload: Workload) -> Run:
    """cutfuse's call in a mode of specialization."""
    if workload.in_mode:
        return Run(workload.in_mode(mode), workload.exact)
    return Run(in_mode(mode, partial(workload.fused, *workload.arguments)), workload.exact)


@dataclass(frozen=True)
class Contender:
    """`prepare` gives the call for a workload that has none of the contender's name, or None where there is none."""

    name: str
    label: str
    prepare: Callable[[Workload], Run | None] = lambda workload: None

    def run(self, workload: Workload) -> Run | None:
        """The call for a workload; None where there is nothing to run."""
        own = workload.extras.get(self.name)
        return own() if own else self.prepare(workload)


def slow_compilers(is_cuda: bool, is_quick: bool) -> tuple[str, ...]:
    """Those that take too long on a CPU, or in a quick run."""
    return () if is_cuda and not is_quick else (AUTOTUNE,) if is_cuda else COMPILERS


# In the tables' order.
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(MM, "torch.mm", bare_product),
        Contender(EAGER, "eager", lambda own: Run(partial(own.eager, *own.arguments), own.exact)),
        Contender(PYTORCH, PYTORCH, lambda own: Run(partial(own.eager, *own.arguments), own.exact)),
        Contender(COMPILE, "torch.compile", compiled),
        Contender(AUTOTUNE, "max-autotune", max_autotuned),
        Contender("chunked", "torch in chunks"),
        Contender("liger", "Liger"),
        Contender("cut-cross-entropy", "cut-cross-entropy"),
        Contender("quack", "quack"),
        Contender(FUSED, "cutfuse", lambda own: Run(partial(own.fused, *own.arguments), own.exact, own.explain)),
        Contender(KEPT, "cutfuse, planes kept"),
        Contender("cutfuse-large", "cutfuse, logits kept"),
        Contender("compile-cutfuse", 'backend="cutfuse"'),
        Contender(INTERPRETED, "interpreted", partial(run_in_mode, "off")),
        Contender(SPECIALIZED, "specialized", partial(run_in_mode, "now")),
        Contender(POINTWISE, "pointwise alone"),
        Contender(PRODUCT, "product alone"),
    )
}
