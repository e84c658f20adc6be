"""The pass that Inductor runs on a graph before it is differentiated."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from .. import native
from ..ops import inductor
from ..registration import cache_tag
from .fusion import fuse


class FusionPass(CustomGraphPass):
    """Fuses what follows linear layers, after the passes that were there before."""

    def __init__(self, before: tuple[Any, ...]) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.before:
            other(graph)
        module = graph.owning_module
        if module is not None:
            inductor.register()
            fuse(module)

    def uuid(self) -> Any:
        """What compiled code depends on besides the graph: these passes. None keeps it out of caches."""
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.before]
        if any(other is None for other in others):
            return None
        own = f"{cache_tag()} {native.core.__file__} {torch.__version__} {others!r}"
        return hashlib.sha256(own.encode()).hexdigest()


def installed_pass(found: Any) -> FusionPass:
    """Inductor's setting with the pass: `found`, or after what is there."""
    return found if isinstance(found, FusionPass) else FusionPass(_passes(found))


def without_pass(found: Any) -> Any:
    """Inductor's setting as it was before the pass was installed."""
    if not isinstance(found, FusionPass):
        return found
    return found.before[0] if len(found.before) == 1 else list(found.before) or None


def _passes(found: Any) -> tuple[Any, ...]:
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)
