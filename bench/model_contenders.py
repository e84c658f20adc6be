"""Who runs a model: eager PyTorch, torch.compile, cutfuse's backend, and both compilers with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config

GRAPHS_MODE = "reduce-overhead"
OR = " or "  # joins the names of contenders of which the faster one is a rival


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

# The faster of eager and a compiler, which is what a user would choose.
FASTER, FASTER_GRAPHS = (f"{EAGER.name}{OR}{compiler.name}" for compiler in (COMPILE, COMPILE_GRAPHS))


def quick_compilers(device: torch.device) -> AbstractContextManager[object]:
    """On a CPU, Inductor calls PyTorch's operations meanwhile, where PyTorch has that setting.

    It would have a C++ compiler take seconds for each graph, and a CPU's times are not what the suite is for.
    """
    setting = "fallback_by_default"
    if device.type == "cpu" and hasattr(inductor_config, setting):
        return inductor_config.patch({setting: True})
    return nullcontext()


def chosen(names: str | None, is_cuda: bool) -> tuple[Contender, ...]:
    """Those that a comma-separated list names, or all: on a CPU, which has no CUDA graphs, without those modes.

    Raises ValueError for a name that there is not.
    """
    if names is None:
        return tuple(found for found in CONTENDERS.values() if is_cuda or found.mode != GRAPHS_MODE)
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in CONTENDERS]
    if unknown:
        raise ValueError(f"unknown contenders {', '.join(unknown)}; choose from {', '.join(CONTENDERS)}")
    return tuple(found for name, found in CONTENDERS.items() if name in wanted)
