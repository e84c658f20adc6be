"""Measures one case of the models suite on a device: its times, its errors, or how long it takes to compile."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from bench import model_errors
from bench.launches import Checked
from bench.model_contenders import CONTENDERS, EAGER, GRAPHS_MODE, Contender
from bench.model_fusion import explained, fused_of
from bench.model_zoo import FORWARD, TRAINING, Inputs, Model
from bench.suite import Figures, Session, Turn
from bench.timing import Call, Clock, give_back, time_models, warm_up
from bench.workloads import PRECISIONS, WRONG_ABOVE, frobenius_error

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


COMPILATION, ERRORS = "compilation", "errors"
COMPILATIONS = 2  # of which the shorter counts


def gradient_of(module: nn.Module, inputs: Inputs, seed: int) -> Tensor | None:
    """A random gradient of the model's output; None where the output is a loss, which needs none."""
    with torch.no_grad():
        inputs.rewind(inputs)
        result = inputs.call(module)
    if result.dim() == 0:
        return None
    generator = torch.Generator(result.device).manual_seed(seed)
    return torch.randn(result.shape, dtype=result.dtype, device=result.device, generator=generator)


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    """An AdamW that does all of its work and leaves the weights as they are, so that every contender has the same."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.0, fused=True)


def caller_for(kind: str, module: nn.Module, inputs: Inputs, seed: int) -> Callable[[Contender], Call]:
    """What gives a contender's call: a forward pass, or one with a backward pass and the optimizer's step."""

    def before() -> None:
        inputs.rewind(inputs)
        torch.compiler.cudagraph_mark_step_begin()  # Results of the call before may be overwritten.

    def forward_call(contender: Contender) -> Call:
        model = contender.of(module)
        return Call(lambda: inputs.call(model), before)

    if kind != TRAINING:
        return forward_call
    gradient, optimizer = gradient_of(module, inputs, seed), optimizer_for(module)

    def training_call(contender: Contender) -> Call:
        model = contender.of(module)

        def step() -> None:
            inputs.call(model).backward(gradient)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return Call(step, before)

    return training_call


def note_on_result(result: Any, expected: Tensor | None, precision: str) -> str:
    """Why a contender is not to be timed: its result is not eager's. Two right results may differ by both errors."""
    if expected is None or not isinstance(result, Tensor):
        return ""
    if result.shape != expected.shape:
        return f"wrong: the result has shape {tuple(result.shape)}, and eager's has {tuple(expected.shape)}"
    error = frobenius_error(result, expected)
    return f"wrong: relative difference {error:.1e} to eager" if error > 2 * WRONG_ABOVE[precision] else ""


def expected_of(kind: str, module: nn.Module, inputs: Inputs) -> Tensor | None:
    """Eager's result as fp64 numbers; None for training, where a model may drop elements at random."""
    if kind == TRAINING:
        return None
    inputs.rewind(inputs)
    return inputs.call(module).double()


@dataclass(frozen=True)
class Started:
    """A contender that is compiled and warm: its call, and the microseconds that the host takes to issue it."""

    call: Call
    host_us: float


def contenders_for(kind: str, precision: str, session: Session) -> list[Contender]:
    """CUDA graphs are timed where a limit is about them, in forward passes of 16 bits: capturing takes long."""
    has_graphs = kind == FORWARD and PRECISIONS[precision].dtype.itemsize == 2
    own = contenders_of(session)
    return [contender for contender in own if has_graphs or contender.mode != GRAPHS_MODE]


def contenders_of(session: Session) -> list[Contender]:
    """Those of the run."""
    return [CONTENDERS[name] for name in session.contenders]


@dataclass(frozen=True)
class Subject:
    """What is measured of a model: `kind`, on a batch and in a precision. `is_small`: with less depth and width."""

    model: Model
    kind: str
    precision: str
    batch: int
    is_small: bool

    def build(self, session: Session) -> nn.Module:
        """The module."""
        dtype = PRECISIONS[self.precision].dtype
        module = self.model.build(self.is_small, dtype, session.device, session.seed)
        return module.train(self.kind == TRAINING)

    def inputs(self, module: nn.Module, session: Session, kind: str, batch: int) -> Inputs:
        """Inputs for it."""
        dtype = PRECISIONS[self.precision].dtype
        return self.model.inputs_on(module, batch, dtype, kind, session.device, session.seed)

    def prepare(self, session: Session) -> Turn | Figures:
        """What times a pass, or the figures of what is not timed in turns."""
        if self.kind == COMPILATION:
            return self.compilation(session)
        return self.errors(session) if self.kind == ERRORS else self.passes(session)

    def errors(self, session: Session) -> Figures:
        """Every contender's errors against fp64."""
        module = self.build(session)

        def inputs_for(kind: str) -> Inputs:
            return self.inputs(module, session, kind, self.batch)

        is_trained = self.model.batches.training is not None
        return model_errors.run(session, contenders_of(session), module, inputs_for, is_trained)

    def compilation(self, session: Session) -> Figures:
        """How long each compiler takes, and how many graphs it makes; `jobs` processes compile side by side."""
        module, reduced = self.build(session), replace(self, is_small=True)
        small = reduced.build(session)
        inputs = self.inputs(module, session, FORWARD, self.batch)
        checked: Checked[None] = Checked(session)

        def compile_with(contender: Contender, entry: Figures) -> None:
            """The graphs of the small model, and the shortest of several compilations of the whole one."""
            entry["graphs"] = graphs_of(contender, small, lambda batch: reduced.inputs(small, session, FORWARD, batch))
            count = 1 if self.is_small else COMPILATIONS
            entry["cold_s"] = min(cold_seconds(contender, module, inputs, session.clock) for _ in range(count))

        # The modes with CUDA graphs compile the same.
        for contender in (own for own in contenders_of(session) if own.backend and own.mode != GRAPHS_MODE):
            checked.add(contender.name, partial(compile_with, contender))
        return {**checked.figures({}), **({"jobs": session.beside} if session.beside > 1 else {})}

    def passes(self, session: Session) -> Turn:
        """Build the model, ask what cutfuse fuses, and compile and warm up every contender; calls are made alone."""
        module = self.build(session)
        inputs = self.inputs(module, session, self.kind, self.batch)
        products, note = explained(module, inputs)
        about: Figures = {"products": products, "fused": fused_of(products), **({"note": note} if note else {})}
        torch._dynamo.reset()  # Explaining is not to leave anything that a contender finds.
        with session.turns.alone():
            expected = expected_of(self.kind, module, inputs)
            call_of = caller_for(self.kind, module, inputs, session.seed)
        checked: Checked[Started] = Checked(session)

        def start(contender: Contender, entry: Figures) -> Started | None:
            """Compile and warm up, and note how many graphs Inductor ran without the CUDA graphs that it was to use."""
            counters = torch._dynamo.utils.counters["inductor"]
            counters["cudagraph_skips"] = 0
            call = call_of(contender)
            call.before()
            result = call.run()
            note = "" if contender == EAGER else note_on_result(result, expected, self.precision)
            del result
            if note:
                entry["note"] = note
                return None
            with session.turns.alone():
                host_us = warm_up(call, session.clock)
            if counters["cudagraph_skips"]:
                entry["without_graphs"] = counters["cudagraph_skips"]
            return Started(call, host_us)

        for contender in contenders_for(self.kind, self.precision, session):
            checked.add(contender.name, partial(start, contender))
            give_back(session.device)  # Cases that are prepared meanwhile share the device's memory.

        def timed() -> Figures:
            calls = {name: own.call for name, own in checked.timed.items()}
            host_us = {name: own.host_us for name, own in checked.timed.items()}
            times = time_models(calls, host_us, session.clock, session.effort, session.seed)
            return {**checked.figures(times), **about}

        return timed
