"""The pass that Inductor runs on a graph before it is differentiated."""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from .. import native
from ..layer import inductor
from .fusion import fuse


class FusionPass(CustomGraphPass):
    """Fuses what follows linear layers, after the passes that were there before."""

    def __init__(self, before: tuple[Any, ...]) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.before:
            other(graph)
        module = graph.owning_module
        if module is not None and not _is_inside_of_another():
            inductor.register()
            fuse(module)

    def uuid(self) -> Any:
        """What compiled code depends on besides the graph: these passes. None keeps it out of caches."""
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.before]
        if any(other is None for other in others):
            return None
        own = f"{digest_of(Path(__file__).parents[1])} {torch.__version__} {others!r}"
        return hashlib.sha256(own.encode()).hexdigest()


@functools.cache
def digest_of(package: Path) -> str:
    """Of the package's code, with the native module: what the pass fuses is another thing in another version."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), Path(native.core.__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_inside_of_another() -> bool:
    """Whether Inductor runs its passes on the graph of a checkpoint's body or of a branch, before those around it.

    What is fused of it depends on the graphs around, which the pass on the outermost one sees. Inductor's function
    calls itself for each graph inside.
    """
    depth, frame = 0, inspect.currentframe()
    while frame is not None and depth < 2:
        depth += frame.f_code.co_name == "_recursive_pre_grad_passes"
        frame = frame.f_back
    return depth > 1


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
