"""Who runs a case of the chains suite: PyTorch's ways, cutfuse interpreted and specialized, and what bounds it."""

from __future__ import annotations

from bench.chain_workloads import ChainWorkload
from bench.contenders import CONTENDERS, Contender, Run
from bench.specialized import INTERPRETED as INTERPRETED_MODE
from bench.specialized import SPECIALIZED as SPECIALIZED_MODE
from bench.workloads import Workload

MM, EAGER, COMPILE, AUTOTUNE = "mm", "eager", "compile", "max-autotune"
INTERPRETED, SPECIALIZED = "interpreted", "specialized"
# What bounds a chain behind a product, where a target names it: the chain alone over z, and the product alone.
POINTWISE, PRODUCT = "pointwise", "product"
CUTFUSE = (INTERPRETED, SPECIALIZED)
NAMES = (MM, EAGER, COMPILE, AUTOTUNE, INTERPRETED, SPECIALIZED, POINTWISE, PRODUCT)
COMPILERS = (COMPILE, AUTOTUNE)
LABELS = {
    MM: "torch.mm",
    EAGER: "eager",
    COMPILE: "torch.compile",
    AUTOTUNE: "max-autotune",
    INTERPRETED: "interpreted",
    SPECIALIZED: "specialized",
    POINTWISE: "pointwise alone",
    PRODUCT: "product alone",
}


def run_in(mode: str, workload: Workload) -> Run:
    """cutfuse's call in a mode of specialization."""
    assert isinstance(workload, ChainWorkload)
    return Run(workload.in_mode(mode), workload.reference)


def contender(name: str, workload: ChainWorkload) -> Contender:
    """A contender of the case: its own, cutfuse in a mode, or one that every suite has."""
    if name in workload.extras:
        guess = CONTENDERS[name].compile_guess_s if name in CONTENDERS else 0.0
        return Contender(name, LABELS[name], lambda _: workload.extras[name], guess)
    modes = {INTERPRETED: INTERPRETED_MODE, SPECIALIZED: SPECIALIZED_MODE}
    if name in modes:
        return Contender(name, LABELS[name], lambda own: run_in(modes[name], own))
    return CONTENDERS[name]


def chosen(names: str | None, is_cuda: bool, is_quick: bool) -> tuple[str, ...]:
    """Those that a comma-separated list names, or all: on a CPU without compilers, and quickly without max-autotune.

    Raises ValueError for a name that there is not.
    """
    if names is None:
        left_out = () if is_cuda and not is_quick else (AUTOTUNE,) if is_cuda else COMPILERS
        return tuple(name for name in NAMES if name not in left_out)
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ValueError(f"unknown contenders {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in wanted)
