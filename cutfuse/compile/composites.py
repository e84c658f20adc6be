"""The operators that the backend puts into graphs. They need nothing of torch.compile's, so that importing is quick."""

from __future__ import annotations

from .cross_entropy import layer_cross_entropy
from .layer import layer

__all__ = ["layer", "layer_cross_entropy"]
