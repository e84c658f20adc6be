"""Measures one case of the models suite on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import model_compilation, model_errors
from bench.accuracy import WRONG_ABOVE, frobenius_error
from bench.format import one_line
from bench.model_contenders import CONTENDERS, EAGER, GRAPHS_MODE, Contender, quick_compilers
from bench.model_fusion import explained, fused_of
from bench.model_timing import Call, time_models, warm_up
from bench.model_zoo import FORWARD, TRAINING, Inputs, Model
from bench.suite import Figures, Session, Turn
from bench.workloads import PRECISIONS

COMPILATION, ERRORS = "compilation", "errors"
COMPILATIONS = 2  # of which the shorter counts


@contextmanager
def convolutions_in_fp32() -> Iterator[None]:
    """cuDNN takes tf32 for convolutions of fp32 by default, which is not the precision that the suite names."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def prepare_for(inputs: Inputs) -> Callable[[], None]:
    """What is done before each call of a model, outside of its time."""

    def before() -> None:
        inputs.rewind(inputs)
        torch.compiler.cudagraph_mark_step_begin()  # Results of the call before may be overwritten.

    return before


def forward_call(contender: Contender, module: nn.Module, inputs: Inputs) -> Call:
    """The forward pass."""
    model = contender.of(module)
    return Call(lambda: inputs.call(model), prepare_for(inputs))


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


def training_call(
    contender: Contender,
    module: nn.Module,
    inputs: Inputs,
    gradient: Tensor | None,
    optimizer: torch.optim.Optimizer,
) -> Call:
    """A training step: forward and backward pass and the optimizer's step."""
    model = contender.of(module)

    def step() -> None:
        inputs.call(model).backward(gradient)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Call(step, prepare_for(inputs))


def caller_for(kind: str, module: nn.Module, inputs: Inputs, seed: int) -> Callable[[Contender], Call]:
    """What gives a contender's call."""
    if kind != TRAINING:
        return lambda contender: forward_call(contender, module, inputs)
    gradient, optimizer = gradient_of(module, inputs, seed), optimizer_for(module)
    return lambda contender: training_call(contender, module, inputs, gradient, optimizer)


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
    """A contender that is compiled and warm: its call, and the microseconds that the host takes to issue it.

    `without_graphs`: how many graphs Inductor ran without a CUDA graph though the contender asks for them.
    """

    call: Call
    host_us: float
    without_graphs: int


def start(
    contender: Contender,
    call_of: Callable[[Contender], Call],
    expected: Tensor | None,
    precision: str,
    session: Session,
) -> Started | str:
    """Compile and warm up; or a note on why the contender is not to be timed."""
    counters = torch._dynamo.utils.counters["inductor"]
    counters["cudagraph_skips"] = 0
    try:
        call = call_of(contender)
        call.before()
        result = call.run()
        note = "" if contender == EAGER else note_on_result(result, expected, precision)
        del result
        if note:
            return note
        with session.turns.alone():
            host_us = warm_up(call, session.clock)
        return Started(call, host_us, counters["cudagraph_skips"])
    except Exception as error:  # Out of memory or a fault of one compiler must not lose the others' times.
        return f"failed: {one_line(error)}"


@contextmanager
def conditions_of(kind: str, precision: str, device: torch.device) -> Iterator[None]:
    """What holds while a case is prepared, and while it is timed."""
    products = PRECISIONS[precision].active()
    with torch.set_grad_enabled(kind == TRAINING), products, convolutions_in_fp32(), quick_compilers(device):
        yield


def contenders_for(kind: str, precision: str, session: Session) -> list[Contender]:
    """CUDA graphs are timed where a limit is about them, in forward passes of 16 bits: capturing takes long."""
    has_graphs = kind == FORWARD and PRECISIONS[precision].dtype.itemsize == 2
    own = contenders_of(session)
    return [contender for contender in own if has_graphs or contender.mode != GRAPHS_MODE]


def contenders_of(session: Session) -> list[Contender]:
    """Those of the run."""
    return [CONTENDERS[name] for name in session.contenders]


@dataclass
class Prepared:
    """A case to time: those contenders that are compiled and warm, and the figures that there are already."""

    figures: Figures
    started: dict[str, Started] = field(default_factory=dict)


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
        with conditions_of(self.kind, self.precision, session.device):
            if self.kind == COMPILATION:
                return self.compilation(session)
            if self.kind == ERRORS:
                return self.errors(session)
            return partial(self.timed, self.warm(session), session)

    def errors(self, session: Session) -> Figures:
        """Every contender's errors against fp64."""
        module = self.build(session)

        def inputs_for(kind: str) -> Inputs:
            return self.inputs(module, session, kind, self.batch)

        is_trained = self.model.batches.training is not None
        return model_errors.run(contenders_of(session), module, inputs_for, is_trained)

    def compilation(self, session: Session) -> Figures:
        """How long each compiler takes, and how many graphs it makes; `jobs` processes compile side by side."""
        module, reduced = self.build(session), replace(self, is_small=True)
        small = reduced.build(session)
        inputs = self.inputs(module, session, FORWARD, self.batch)
        entries = {}
        for contender in model_compilation.compilers_of(contenders_of(session)):
            entries[contender.name] = model_compilation.figures_of(
                contender,
                module,
                inputs,
                small,
                lambda batch: reduced.inputs(small, session, FORWARD, batch),
                1 if self.is_small else COMPILATIONS,
                session.clock,
            )
        return {"contenders": entries, **({"jobs": session.beside} if session.beside > 1 else {})}

    def warm(self, session: Session) -> Prepared:
        """Build the model, ask what cutfuse fuses, and compile and warm up every contender; calls are made alone."""
        module = self.build(session)
        inputs = self.inputs(module, session, self.kind, self.batch)
        products, note = explained(module, inputs)
        figures: Figures = {"contenders": {}, "rounds": 0, "products": products, "fused": fused_of(products)}
        prepared = Prepared({**figures, "note": note} if note else figures)
        torch._dynamo.reset()  # Explaining is not to leave anything that a contender finds.
        with session.turns.alone():
            expected = expected_of(self.kind, module, inputs)
            call_of = caller_for(self.kind, module, inputs, session.seed)
        for contender in contenders_for(self.kind, self.precision, session):
            found = start(contender, call_of, expected, self.precision, session)
            if session.device.type == "cuda":
                torch.cuda.empty_cache()  # Cases that are prepared meanwhile share the device's memory.
            if isinstance(found, str):
                figures["contenders"][contender.name] = {"note": found}
                continue
            prepared.started[contender.name] = found
            skipped = found.without_graphs
            figures["contenders"][contender.name] = {"without_graphs": skipped} if skipped else {}
        return prepared

    def timed(self, prepared: Prepared, session: Session) -> Figures:
        """Times of every contender, and what cutfuse fused."""
        figures, started = prepared.figures, prepared.started
        calls = {name: own.call for name, own in started.items()}
        host_us = {name: own.host_us for name, own in started.items()}
        if not calls:
            return figures
        with conditions_of(self.kind, self.precision, session.device):
            times, figures["rounds"] = time_models(calls, host_us, session.clock, session.effort, session.seed)
        for name, own in times.items():
            figures["contenders"][name].update(asdict(own))
        return figures
