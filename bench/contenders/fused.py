"""cutfuse's ways to run a workload."""

from __future__ import annotations

from bench.contenders.contender import Contender, Run
from bench.workloads import Workload


def fused(workload: Workload) -> Run:
    """The public function or drop-in module."""
    return Run(lambda: workload.fused(*workload.arguments), workload.reference)


def fused_with_kept_planes(workload: Workload) -> Run | None:
    """The same with a prepared weight, which keeps its planes."""
    return None if workload.kept is None else fused(workload.kept)


FUSED = Contender("cutfuse", "cutfuse", fused)
KEPT = Contender("cutfuse-kept", "cutfuse, planes kept", fused_with_kept_planes)
