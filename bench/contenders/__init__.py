"""What runs against what: a name, and how to get a launch out of a workload."""

from __future__ import annotations

from bench.contenders.baselines import BASELINES
from bench.contenders.contender import Contender, Run
from bench.contenders.fused import FUSED, KEPT

# In the table's order. cutfuse's entry is the one that the ratios are of.
CONTENDERS: dict[str, Contender] = {contender.name: contender for contender in (*BASELINES, FUSED, KEPT)}

__all__ = ["CONTENDERS", "Contender", "Run"]
