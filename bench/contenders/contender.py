"""The interface between a contender and the runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bench.workloads import Reference, Workload


@dataclass(frozen=True)
class Run:
    """A call that gives the contender's result, and what the result should be."""

    launch: Callable[[], Tensor]
    reference: Reference


@dataclass(frozen=True)
class Contender:
    """`prepare` gives the call for a workload, or None where the contender has nothing to run.

    `compile_guess_s` is 0 for what needs no compilation, otherwise a first guess of its seconds for the time budget.
    """

    name: str
    label: str
    prepare: Callable[[Workload], Run | None]
    compile_guess_s: float = 0.0
