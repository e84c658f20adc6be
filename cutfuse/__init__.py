"""What follows a linear layer, run inside the matrix product."""

from __future__ import annotations

from . import epilogue, models, nn
from .epilogue import Epilogue, EpilogueError
from .explain import explain
from .linear import linear
from .pointwise import pointwise, sigmoid
from .reduce import reduce, sum

__all__ = [
    "Epilogue",
    "EpilogueError",
    "epilogue",
    "explain",
    "linear",
    "models",
    "nn",
    "pointwise",
    "reduce",
    "sigmoid",
    "sum",
]

__version__ = "0.1.0"  # the build takes the distribution's version from here
