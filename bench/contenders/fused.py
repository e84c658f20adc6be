"""cutfuse's way to run a workload."""

from __future__ import annotations

from bench.contenders.contender import Contender, Run
from bench.workloads import Workload


def fused(workload: Workload) -> Run:
    """The public function or drop-in module."""
    return Run(lambda: workload.fused(*workload.arguments), workload.reference)


FUSED = Contender("cutfuse", "cutfuse", fused)
