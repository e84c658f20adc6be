"""What follows a linear layer, run inside the matrix product."""

from __future__ import annotations

from . import compile, epilogue, models, nn
from . import registration as registration
from .compile import explain_model
from .epilogue import Epilogue, EpilogueError
from .explain import explain, is_available
from .head import linear_cross_entropy, linear_logprob
from .invariance import batch_invariant, get_batch_invariant, set_batch_invariant
from .linear import linear
from .mlp import mlp
from .pointwise import pointwise, sigmoid
from .precision import get_precision, precision, set_precision
from .prepare import PreparedWeight, prepare
from .reduce import reduce, sum
from .rounding import get_rounding, rounding, set_rounding
from .specialization import get_specialization, set_specialization, specialization, wait

__all__ = [
    "Epilogue",
    "EpilogueError",
    "PreparedWeight",
    "batch_invariant",
    "compile",
    "epilogue",
    "explain",
    "explain_model",
    "get_batch_invariant",
    "get_precision",
    "get_rounding",
    "get_specialization",
    "is_available",
    "linear",
    "linear_cross_entropy",
    "linear_logprob",
    "mlp",
    "models",
    "nn",
    "pointwise",
    "precision",
    "prepare",
    "reduce",
    "rounding",
    "set_batch_invariant",
    "set_precision",
    "set_rounding",
    "set_specialization",
    "sigmoid",
    "specialization",
    "sum",
    "wait",
]

__version__ = "0.3.0.dev0"  # the build takes the distribution's version from here
