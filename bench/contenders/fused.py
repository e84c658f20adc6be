"""cutfuse's ways to run a workload."""

from __future__ import annotations

from bench.contenders.contender import Contender, Run
from bench.workloads import Workload


def fused(workload: Workload) -> Run:
    """The public function or drop-in module."""
    return Run(lambda: workload.fused(*workload.arguments), workload.reference)


def fused_with_kept_planes(workload: Workload) -> Run | None:
    """The same with a weight that keeps its planes."""
    if workload.kept is None:
        return None
    run = fused(workload.kept)
    run.launch()  # The first call notes the weight, the second keeps its planes: that one is checked.
    return run


FUSED = Contender("cutfuse", "cutfuse", fused)
KEPT = Contender("cutfuse-kept", "cutfuse, planes kept", fused_with_kept_planes)
