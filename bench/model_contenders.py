"""Who runs a model: eager PyTorch, torch.compile, cutfuse's backend, and both compilers with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

GRAPHS_MODE = "reduce-overhead"


@dataclass(frozen=True)
class Contender:
    """`backend` and `mode` are torch.compile's; without a backend the model runs as it is."""

    name: str
    label: str
    backend: str | None = None
    mode: str | None = None

    def of(self, module: nn.Module) -> Callable[..., Any]:
        """What to call in place of the module; it compiles in its first call."""
        return module if self.backend is None else torch.compile(module, backend=self.backend, mode=self.mode)


EAGER = Contender("eager", "eager")
COMPILE = Contender("compile", "torch.compile", "inductor")
COMPILE_GRAPHS = Contender("compile-graphs", "torch.compile, CUDA graphs", "inductor", GRAPHS_MODE)
CUTFUSE = Contender("cutfuse", "cutfuse", "cutfuse")
CUTFUSE_GRAPHS = Contender("cutfuse-graphs", "cutfuse, CUDA graphs", "cutfuse", GRAPHS_MODE)
CONTENDERS: Mapping[str, Contender] = {
    contender.name: contender for contender in (EAGER, COMPILE, COMPILE_GRAPHS, CUTFUSE, CUTFUSE_GRAPHS)
}

# The faster of eager and a compiler is what a user would choose.
FASTER, FASTER_GRAPHS = (EAGER, COMPILE), (EAGER, COMPILE_GRAPHS)


def without_graphs(is_cuda: bool, is_quick: bool) -> tuple[str, ...]:
    """The modes with CUDA graphs, which a CPU does not have."""
    del is_quick
    return () if is_cuda else tuple(name for name, found in CONTENDERS.items() if found.mode == GRAPHS_MODE)
