"""How long a model takes to compile without any cache, and how many graphs several batch sizes need."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from bench.format import note_on
from bench.model_contenders import GRAPHS_MODE, Contender
from bench.model_zoo import Inputs
from bench.timing import Clock

BATCH_SIZES = (2, 3, 5, 6, 8)


@contextmanager
def without_caches() -> Iterator[None]:
    """Nothing that was compiled before is found, in memory or in files, and nothing is kept."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), fresh_cache(), torch._inductor.config.patch(force_disable_caches=True):
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")  # It says what was asked for.
        yield
    torch._dynamo.reset()


def cold_seconds(contender: Contender, module: nn.Module, inputs: Inputs, clock: Clock) -> float:
    """The time of the first call, which compiles."""
    with without_caches():
        inputs.rewind(inputs)
        clock.wait()
        began = time.perf_counter()
        inputs.call(contender.of(module))
        clock.wait()
        return time.perf_counter() - began


def graphs_of(contender: Contender, module: nn.Module, inputs_of: Callable[[int], Inputs]) -> int:
    """How many graphs are compiled for all of the batch sizes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = contender.of(module)
    for batch in BATCH_SIZES:
        inputs = inputs_of(batch)
        inputs.rewind(inputs)
        inputs.call(model)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def figures_of(
    contender: Contender,
    module: nn.Module,
    inputs: Inputs,
    small: nn.Module,
    small_inputs: Callable[[int], Inputs],
    compilations: int,
    clock: Clock,
) -> dict[str, Any]:
    """One compiler's figures: the graphs of the small model, and the shortest of `compilations` of the whole one."""
    try:
        graphs = graphs_of(contender, small, small_inputs)
        seconds = [cold_seconds(contender, module, inputs, clock) for _ in range(compilations)]
    except Exception as error:  # One compiler's failure must not lose the other's figures.
        return note_on(error)
    return {"graphs": graphs, "cold_s": min(seconds)}


def compilers_of(contenders: Sequence[Contender]) -> list[Contender]:
    """Those that compile, without the modes with CUDA graphs, which compile the same."""
    return [found for found in contenders if found.backend is not None and found.mode != GRAPHS_MODE]
