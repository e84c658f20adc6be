"""The reference models in plain PyTorch: what the drop-ins of `cutfuse.nn` are checked and measured against."""

from __future__ import annotations

from .gemm_divide_sum_scale import GemmDivideSumScale
from .gemm_sigmoid_scale_residual import GemmSigmoidScaleResidual
from .linear_sigmoid_sum import LinearSigmoidSum
from .sigmoid import Sigmoid
from .sum_reduction import SumReduction

__all__ = ["GemmDivideSumScale", "GemmSigmoidScaleResidual", "LinearSigmoidSum", "Sigmoid", "SumReduction"]
