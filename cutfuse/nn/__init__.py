"""Drop-ins: `FusedLinear`, and the reference models of `cutfuse.models` with the same arguments and parameters."""

from __future__ import annotations

from .drop_ins import GemmDivideSumScale, GemmSigmoidScaleResidual, LinearSigmoidSum, Sigmoid, SumReduction
from .fused_linear import FusedLinear

__all__ = [
    "FusedLinear",
    "GemmDivideSumScale",
    "GemmSigmoidScaleResidual",
    "LinearSigmoidSum",
    "Sigmoid",
    "SumReduction",
]
