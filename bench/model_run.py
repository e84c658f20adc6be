"""Measures one case of the models suite on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import model_compilation, model_errors
from bench.accuracy import WRONG_ABOVE
from bench.accuracy_suite import frobenius_error
from bench.model_cases import COMPILATION, PASSES, Case
from bench.model_contenders import EAGER, GRAPHS_MODE, Contender, quick_compilers
from bench.model_fusion import explained, fused_of
from bench.model_timing import Call, time_models, warm_up
from bench.model_zoo import FORWARD, TRAINING, Inputs
from bench.progress import Progress
from bench.runner import one_line
from bench.timing import Clock, Effort
from bench.workloads import PRECISIONS


@dataclass(frozen=True)
class Options:
    """How cases are measured."""

    device: torch.device
    contenders: tuple[Contender, ...]
    effort: Effort
    seed: int = 0
    compilations: int = 2


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


def caller_for(case: Case, options: Options, module: nn.Module, inputs: Inputs) -> Callable[[Contender], Call]:
    """What gives a contender's call."""
    if case.kind != TRAINING:
        return lambda contender: forward_call(contender, module, inputs)
    gradient, optimizer = gradient_of(module, inputs, options.seed), optimizer_for(module)
    return lambda contender: training_call(contender, module, inputs, gradient, optimizer)


def note_on_result(result: Any, expected: Tensor | None, precision: str) -> str:
    """Why a contender is not to be timed: its result is not eager's. Two right results may differ by both errors."""
    if expected is None or not isinstance(result, Tensor):
        return ""
    if result.shape != expected.shape:
        return f"wrong: the result has shape {tuple(result.shape)}, and eager's has {tuple(expected.shape)}"
    error = frobenius_error(result, expected)
    return f"wrong: relative difference {error:.1e} to eager" if error > 2 * WRONG_ABOVE[precision] else ""


def expected_of(case: Case, module: nn.Module, inputs: Inputs) -> Tensor | None:
    """Eager's result as fp64 numbers; None for training, where a model may drop elements at random."""
    if case.kind == TRAINING:
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


# Within it, nothing else of the run uses the device.
Alone = Callable[[], AbstractContextManager[None]]


def start(
    case: Case,
    contender: Contender,
    call_of: Callable[[Contender], Call],
    expected: Tensor | None,
    clock: Clock,
    alone: Alone,
) -> Started | str:
    """Compile and warm up; or a note on why the contender is not to be timed."""
    counters = torch._dynamo.utils.counters["inductor"]
    counters["cudagraph_skips"] = 0
    try:
        call = call_of(contender)
        call.before()
        result = call.run()
        note = "" if contender == EAGER else note_on_result(result, expected, case.precision)
        del result
        if note:
            return note
        with alone():
            host_us = warm_up(call, clock)
        return Started(call, host_us, counters["cudagraph_skips"])
    except Exception as error:  # Out of memory or a fault of one compiler must not lose the others' times.
        return f"failed: {one_line(error)}"


@dataclass(frozen=True)
class Subject:
    """A case's module, and what makes inputs for it."""

    case: Case
    options: Options
    is_small: bool

    def build(self) -> nn.Module:
        """The module: of the case's size, or small."""
        dtype = PRECISIONS[self.case.precision].dtype
        module = self.case.model.build(self.is_small, dtype, self.options.device, self.options.seed)
        return module.train(self.case.kind == TRAINING)

    def inputs(self, module: nn.Module, batch: int, kind: str) -> Inputs:
        """Inputs for it."""
        dtype = PRECISIONS[self.case.precision].dtype
        return self.case.model.inputs_on(module, batch, dtype, kind, self.options.device, self.options.seed)


def run_compilation(subject: Subject, clock: Clock, progress: Progress) -> dict[str, Any]:
    """How long each compiler takes, and how many graphs it makes."""
    options = subject.options
    module, reduced = subject.build(), replace(subject, is_small=True)
    small = reduced.build()
    inputs = subject.inputs(module, subject.case.batch, FORWARD)
    entries = {}
    for contender in model_compilation.compilers_of(options.contenders):
        progress.stage(contender.label)
        entries[contender.name] = model_compilation.figures_of(
            contender,
            module,
            inputs,
            small,
            lambda batch: reduced.inputs(small, batch, FORWARD),
            options.compilations,
            clock,
        )
    return {"contenders": entries}


@contextmanager
def conditions_of(case: Case, device: torch.device) -> Iterator[None]:
    """What holds while a case is prepared, and while it is timed."""
    needs_grad, precision = case.kind == TRAINING, PRECISIONS[case.precision].active()
    with torch.set_grad_enabled(needs_grad), precision, convolutions_in_fp32(), quick_compilers(device):
        yield


def contenders_for(case: Case, options: Options) -> list[Contender]:
    """CUDA graphs are timed where a limit is about them, in forward passes of 16 bits: capturing takes long."""
    has_graphs = case.kind == FORWARD and PRECISIONS[case.precision].dtype.itemsize == 2
    return [contender for contender in options.contenders if has_graphs or contender.mode != GRAPHS_MODE]


@dataclass
class Prepared:
    """A case to time: those contenders that are compiled and warm, and the figures that there are already."""

    case: Case
    products: list[dict[str, Any]]
    note: str
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: dict[str, Started] = field(default_factory=dict)


def prepare(case: Case, options: Options, clock: Clock, progress: Progress, alone: Alone = nullcontext) -> Prepared:
    """Build the model, ask what cutfuse fuses, and compile and warm up every contender; calls are made `alone`."""
    subject = Subject(case, options, case.is_small)
    with conditions_of(case, options.device):
        module = subject.build()
        inputs = subject.inputs(module, case.batch, case.kind)
        progress.stage("explaining")
        prepared = Prepared(case, *explained(module, inputs))
        torch._dynamo.reset()  # Explaining is not to leave anything that a contender finds.
        with alone():
            expected = expected_of(case, module, inputs)
            call_of = caller_for(case, options, module, inputs)
        for contender in contenders_for(case, options):
            progress.stage(contender.label)
            found = start(case, contender, call_of, expected, clock, alone)
            if options.device.type == "cuda":
                torch.cuda.empty_cache()  # Cases that are prepared meanwhile share the device's memory.
            if isinstance(found, str):
                prepared.entries[contender.name] = {"note": found}
                continue
            prepared.started[contender.name] = found
            skipped = found.without_graphs
            prepared.entries[contender.name] = {"without_graphs": skipped} if skipped else {}
    return prepared


def timed(prepared: Prepared, options: Options, clock: Clock, progress: Progress) -> dict[str, Any]:
    """Times of every contender, and what cutfuse fused."""
    progress.stage("timing")
    entries, products = prepared.entries, prepared.products
    calls = {name: own.call for name, own in prepared.started.items()}
    host_us = {name: own.host_us for name, own in prepared.started.items()}
    with conditions_of(prepared.case, options.device):
        times, rounds = time_models(calls, host_us, clock, options.effort, options.seed) if calls else ({}, 0)
    for name, own in times.items():
        entries[name].update(asdict(own))
    figures = {"contenders": entries, "rounds": rounds, "products": products, "fused": fused_of(products)}
    return {**figures, "note": prepared.note} if prepared.note else figures


def run_untimed(case: Case, options: Options, clock: Clock, progress: Progress) -> dict[str, Any]:
    """The figures of a case that is about compilation or errors."""
    subject = Subject(case, options, case.is_small)
    with conditions_of(case, options.device):
        if case.kind == COMPILATION:
            return run_compilation(subject, clock, progress)
        module = subject.build()
        is_trained = case.model.batches.training is not None
        inputs_for = partial(subject.inputs, module, case.batch)
        return model_errors.run(options.contenders, module, inputs_for, is_trained, progress)


def run_case(case: Case, options: Options, clock: Clock, progress: Progress) -> dict[str, Any]:
    """Build the model and measure what the case is about; its figures as JSON holds them."""
    if case.kind not in PASSES:
        return run_untimed(case, options, clock, progress)
    return timed(prepare(case, options, clock, progress), options, clock, progress)
