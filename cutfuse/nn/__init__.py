"""`FusedLinear`, `MLP`, `LinearCrossEntropy`, and drop-ins for the reference models of `cutfuse.models`, which have the
same arguments and parameters."""

from __future__ import annotations

import sys

from . import drop_ins
from .drop_ins import GemmDivideSumScale, GemmSigmoidScaleResidual, LinearSigmoidSum, Sigmoid, SumReduction
from .fused_linear import FusedLinear
from .linear_cross_entropy import LinearCrossEntropy
from .mlp import MLP, fuse_mlps

__all__ = [
    "MLP",
    "FusedLinear",
    "GemmDivideSumScale",
    "GemmSigmoidScaleResidual",
    "LinearCrossEntropy",
    "LinearSigmoidSum",
    "Sigmoid",
    "SumReduction",
    "fuse_mlps",
]

# The modules that the classes were in up to 0.2.0: pickles of whole modules name them.
for _name in ("gemm_divide_sum_scale", "gemm_sigmoid_scale_residual", "linear_sigmoid_sum", "sigmoid", "sum_reduction"):
    sys.modules[f"{__name__}.{_name}"] = drop_ins
