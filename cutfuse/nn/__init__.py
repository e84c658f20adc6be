"""`FusedLinear`, `LinearCrossEntropy`, and drop-ins for the reference models of `cutfuse.models`, which have the same
arguments and parameters."""

from __future__ import annotations

from .fused_linear import FusedLinear
from .gemm_divide_sum_scale import GemmDivideSumScale
from .gemm_sigmoid_scale_residual import GemmSigmoidScaleResidual
from .linear_cross_entropy import LinearCrossEntropy
from .linear_sigmoid_sum import LinearSigmoidSum
from .sigmoid import Sigmoid
from .sum_reduction import SumReduction

__all__ = [
    "FusedLinear",
    "GemmDivideSumScale",
    "GemmSigmoidScaleResidual",
    "LinearCrossEntropy",
    "LinearSigmoidSum",
    "Sigmoid",
    "SumReduction",
]
