"""Measures one case of the models suite on a device: who runs a model, how long each takes and takes to compile, the
errors of outputs and gradients against fp64, and what of the model was fused.
"""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.overrides import TorchFunctionMode

import cutfuse
from bench.launches import Checked
from bench.model_zoo import FORWARD, TRAINING, Inputs, Model
from bench.suite import Figures, Session, Turn
from bench.tables import one_line
from bench.timing import Call, Clock, give_back, time_models, warm_up
from bench.workloads import PRECISIONS, WRONG_ABOVE, relative_error

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


FATE = ("fused", "program", "ended_at", "reason")
# Of two predictions, as cutfuse.compile.choice words them; the second is what would have been fused.
PREDICTIONS = re.compile(r"predicted to take [\d.]+ us, (.+?),? [\d.]+ us.*")


def pattern_of(module: str) -> str:
    """A module's name with "*" for the numbers of layers; a name of nothing but numbers stays."""
    parts = module.split(".")
    return module if all(map(str.isdigit, parts)) else ".".join("*" if part.isdigit() else part for part in parts)


def product_rows(products: Iterable[Any]) -> list[dict[str, Any]]:
    """A model's products for the results file: one row for those that differ by the layer's number only."""
    counts = Counter(
        (
            pattern_of(product.module),
            int(product.m),
            int(product.n),
            int(product.k),
            str(product.dtype).removeprefix("torch."),
            bool(product.is_fused),
            product.program,
            product.ended_at,
            product.reason,
        )
        for product in products
    )
    names = ("module", "m", "n", "k", "dtype", "fused", "program", "ended_at", "reason")
    return [{**dict(zip(names, row, strict=True)), "count": count} for row, count in counts.items()]


def explained(module: nn.Module, inputs: Inputs) -> Figures:
    """A model's products, how many of how many are fused, and a note where the explanation failed."""
    try:
        rows = product_rows(cutfuse.explain_model(module, *inputs.arguments, **inputs.keywords).products)
    except Exception as error:  # The times are good without the explanation; the report shows why it is missing.
        return {"products": [], "fused": "", "note": f"explain failed: {one_line(error)}"}
    fused, whole = (sum(row["count"] for row in own) for own in ([row for row in rows if row["fused"]], rows))
    return {"products": rows, "fused": f"{fused} of {whole}" if rows else ""}


def kind_of(reason: str) -> str:
    """A reason without the predicted times, by which two layers that are left for the same reason would differ."""
    return PREDICTIONS.sub(r"predicted to take less than \1", reason)


def names_of(own: Sequence[dict[str, Any]], all_cases: Sequence[dict[str, Any]]) -> str:
    """The cases `own` of one model's: "all", a variant and precision for all of its shapes, or with the shapes."""
    if len(own) == len(all_cases):
        return "all"
    named: dict[str, list[str]] = {}
    for case in own:
        named.setdefault(f"{case['variant']} {case['precision']}", []).append(case["shape"])
    whole = Counter(f"{case['variant']} {case['precision']}" for case in all_cases)
    return "; ".join(
        name if len(shapes) == whole[name] else f"{name} {', '.join(shapes)}" for name, shapes in named.items()
    )


def fusion_rows(cases: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What became of every model's products over all of its cases: a row for the layers that were treated alike.

    `layers` names them with how often they occur and their N x K. `cases` is "all" where that is every case of the
    model that has an explanation.
    """
    models: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        if case.get("products"):
            models.setdefault(case["group"], []).append(case)
    for model, own in models.items():
        found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}  # by layer and what became of it
        for case in own:
            for row in case["products"]:
                layer = f"{row['count']} x {row['module']} {row['n']}x{row['k']}"
                fate = {**row, "reason": kind_of(row["reason"])}
                seen = found.setdefault((layer, *(fate[part] for part in FATE)), [])
                if case not in seen:
                    seen.append(case)
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for (layer, *parts), seen in found.items():
            about = {"model": model, **dict(zip(FATE, parts, strict=True)), "cases": names_of(seen, own)}
            rows.setdefault(tuple(about.values()), {**about, "layers": []})["layers"].append(layer)
        yield from rows.values()


class WithoutFp32(TorchFunctionMode):
    """Makes fp64 of the fp32 that a model asks for, as in a norm: the reference is to be in fp64 throughout."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(widened_type, args), **{name: widened_type(item) for name, item in (kwargs or {}).items()})


def widened_type(value: Any) -> Any:
    """fp64 for fp32."""
    return torch.float64 if value is torch.float32 else value


def widened(value: Any) -> Any:
    """A copy of an argument in fp64: a tensor, or a cache of keys and values; anything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if not hasattr(value, "layers"):
        return value
    cache = copy.copy(value)
    cache.layers = [copy.copy(layer) for layer in value.layers]
    for layer in cache.layers:
        tensors = {name: widened(item) for name, item in vars(layer).items() if isinstance(item, Tensor)}
        vars(layer).update(tensors)
    return cache


def in_fp64(module: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
    """A copy of the module in fp64, and a call of it that computes in nothing less."""
    wide = copy.deepcopy(module).double()

    def call(*arguments: Any, **keywords: Any) -> Any:
        with WithoutFp32():
            return wide(*arguments, **keywords)

    return wide, call


def widened_inputs(inputs: Inputs) -> Inputs:
    """The same inputs in fp64."""
    keywords = {name: widened(item) for name, item in inputs.keywords.items()}
    return replace(inputs, arguments=tuple(map(widened, inputs.arguments)), keywords=keywords)


def trained(module: nn.Module) -> list[Tensor]:
    """The parameters that have a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def output_of(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    """The forward pass's result, without gradients."""
    with torch.no_grad():
        inputs.rewind(inputs)
        return inputs.call(model)


def gradients_of(model: Callable[..., Any], module: nn.Module, inputs: Inputs, seed: int) -> tuple[Tensor, ...]:
    """The gradients of the module's parameters; a random one comes in where the model's result is no loss."""
    with torch.enable_grad():
        inputs.rewind(inputs)
        result = inputs.call(model)
        generator = torch.Generator(result.device).manual_seed(seed)
        incoming = torch.randn(result.shape, dtype=torch.float32, device=result.device, generator=generator)
        # Rounded to bf16, so that it is the same in every precision; of a loss it is 1.
        incoming = torch.ones_like(result) if result.dim() == 0 else incoming.bfloat16().to(result.dtype)
        parameters = trained(module)
        found = torch.autograd.grad(result, parameters, incoming, allow_unused=True)
    return tuple(
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    )


BATCH_SIZES = (2, 3, 5, 6, 8)


def cold_seconds(contender: Contender, module: nn.Module, inputs: Inputs, clock: Clock) -> float:
    """The time of the first call, which compiles: nothing that was compiled before is found, in memory or in files."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), fresh_cache(), torch._inductor.config.patch(force_disable_caches=True):
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")  # It says what was asked for.
        inputs.rewind(inputs)
        clock.wait()
        began = time.perf_counter()
        inputs.call(contender.of(module))
        clock.wait()
        seconds = time.perf_counter() - began
    torch._dynamo.reset()
    return seconds


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
    result = output_of(module, inputs)
    if result.dim() == 0:
        return None
    generator = torch.Generator(result.device).manual_seed(seed)
    return torch.randn(result.shape, dtype=result.dtype, device=result.device, generator=generator)


def caller_for(kind: str, module: nn.Module, inputs: Inputs, seed: int) -> Callable[[Contender], Call]:
    """What gives a contender's call: a forward pass, or one with a backward pass and the optimizer's step."""

    def before() -> None:
        inputs.rewind(inputs)
        torch.compiler.cudagraph_mark_step_begin()  # Results of the call before may be overwritten.

    if kind == TRAINING:
        gradient = gradient_of(module, inputs, seed)
        # It does all of its work and leaves the weights as they are, so that every contender has the same.
        optimizer = torch.optim.AdamW(trained(module), lr=0.0, fused=True)

    def call_of(contender: Contender) -> Call:
        model = contender.of(module)

        def step() -> None:
            inputs.call(model).backward(gradient)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return Call(step if kind == TRAINING else lambda: inputs.call(model), before)

    return call_of


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

    def contenders(self, session: Session) -> list[Contender]:
        """Those that are measured. CUDA graphs, whose capturing takes long, have the kernels of those without.

        They are timed where a limit is about them: in forward passes of 16 bits.
        """
        has_graphs = self.kind == FORWARD and PRECISIONS[self.precision].dtype.itemsize == 2
        own = [CONTENDERS[name] for name in session.contenders]
        return [
            contender
            for contender in own
            if (has_graphs or contender.mode != GRAPHS_MODE) and (contender.backend or self.kind != COMPILATION)
        ]

    def prepare(self, session: Session) -> Turn | Figures:
        """What times a pass, or the figures of what is not timed in turns."""
        if self.kind == COMPILATION:
            return self.compilation(session)
        return self.errors(session) if self.kind == ERRORS else self.passes(session)

    def errors(self, session: Session) -> Figures:
        """Every contender's errors against fp64, in eval mode, so that no elements are dropped at random."""
        module, seed = self.build(session), 1
        wide, call = in_fp64(module)
        inputs = self.inputs(module, session, FORWARD, self.batch)
        exact = output_of(call, widened_inputs(inputs))
        is_trained = self.model.batches.training is not None
        if is_trained:
            learning = self.inputs(module, session, TRAINING, self.batch)
            gradients = gradients_of(call, wide, widened_inputs(learning), seed)
        del wide, call

        def check(contender: Contender, entry: Figures) -> None:
            entry["error"] = relative_error(output_of(contender.of(module), inputs), exact)
            if is_trained:
                found = gradients_of(contender.of(module), module, learning, seed)
                entry["gradient_error"] = relative_error(found, gradients)

        checked: Checked[None] = Checked(session)
        for contender in self.contenders(session):
            checked.add(contender.name, partial(check, contender))
        return checked.figures({})

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

        for contender in self.contenders(session):
            checked.add(contender.name, partial(compile_with, contender))
        return {**checked.figures({}), **({"jobs": session.beside} if session.beside > 1 else {})}

    def passes(self, session: Session) -> Turn:
        """Build the model, ask what cutfuse fuses, and compile and warm up every contender; calls are made alone."""
        module = self.build(session)
        inputs = self.inputs(module, session, self.kind, self.batch)
        about = explained(module, inputs)
        torch._dynamo.reset()  # Explaining is not to leave anything that a contender finds.
        with session.turns.alone():
            inputs.rewind(inputs)
            # None for training, where a model may drop elements at random.
            expected = None if self.kind == TRAINING else inputs.call(module).double()
            call_of = caller_for(self.kind, module, inputs, session.seed)
        checked: Checked[tuple[Call, float]] = Checked(session)

        def start(contender: Contender, entry: Figures) -> tuple[Call, float] | None:
            """Compile and warm up, and note how many graphs Inductor ran without the CUDA graphs that it was to use.

            Gives the call, and the microseconds that the host takes to issue it.
            """
            counters = torch._dynamo.utils.counters["inductor"]
            counters["cudagraph_skips"] = 0
            call = call_of(contender)
            call.before()
            result = call.run()
            # Two right results may differ by both errors.
            error = 0.0 if expected is None or contender == EAGER else relative_error(result, expected)
            del result
            if error > 2 * WRONG_ABOVE[self.precision]:
                entry["note"] = f"wrong: relative difference {error:.1e} to eager"
                return None
            with session.turns.alone():
                host_us = warm_up(call, session.clock)
            if counters["cudagraph_skips"]:
                entry["without_graphs"] = counters["cudagraph_skips"]
            return call, host_us

        for contender in self.contenders(session):
            checked.add(contender.name, partial(start, contender))
            give_back(session.device)  # Cases that are prepared meanwhile share the device's memory.

        def timed() -> Figures:
            calls = {name: call for name, (call, _) in checked.timed.items()}
            host_us = {name: us for name, (_, us) in checked.timed.items()}
            times = time_models(calls, host_us, session.clock, session.effort, session.seed)
            return {**checked.figures(times), **about}

        return timed
