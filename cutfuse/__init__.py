"""What follows a linear layer, run inside the matrix product."""

from __future__ import annotations

from . import epilogue, models, nn
from .epilogue import Epilogue, EpilogueError
from .explain import explain
from .linear import linear
from .ops.planes import forget_planes, plane_memory, set_plane_memory
from .pointwise import pointwise, sigmoid
from .precision import get_precision, precision, set_precision
from .reduce import reduce, sum

__all__ = [
    "Epilogue",
    "EpilogueError",
    "epilogue",
    "explain",
    "forget_planes",
    "get_precision",
    "linear",
    "models",
    "nn",
    "plane_memory",
    "pointwise",
    "precision",
    "reduce",
    "set_plane_memory",
    "set_precision",
    "sigmoid",
    "sum",
]

__version__ = "0.1.0"  # the build takes the distribution's version from here
