"""PyTorch's ways to run a workload: the bare product, eager, torch.compile and max-autotune."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.contenders.contender import Contender, Run
from bench.workloads import Workload

# The same kernels as mode "max-autotune" without its CUDA graphs. With graphs each launch first copies its inputs to
# fixed addresses (6.4 GB for the sigmoid), and the host time that graphs save is in no contender's figure.
MAX_AUTOTUNE_MODE = "max-autotune-no-cudagraphs"


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


BASELINES = (
    Contender("mm", "torch.mm", bare_product),
    Contender("eager", "eager", eager),
    Contender("compile", "torch.compile", compiled, compile_guess_s=4.0),
    Contender("max-autotune", "max-autotune", max_autotuned, compile_guess_s=20.0),
)
