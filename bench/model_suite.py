"""The models suite: whole models through torch.compile, with cutfuse and without.

Who runs a model, how long each takes and takes to compile, the errors of outputs and gradients against fp64, and what
of the model was fused.
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
from bench import workloads
from bench.goals import MEAN, WORST, cases_with, figure_of, quotient
from bench.launches import Checked
from bench.model_zoo import FORWARD, MODELS, PACKAGES, TRAINING, Inputs, Model, remark_on
from bench.suite import Case, Figures, Goal, Results, Session, Suite, Turn, title_of
from bench.tables import (
    MISSING,
    Table,
    case_table,
    error,
    figure,
    microseconds,
    of,
    one_line,
    ratio,
    ratio_of,
    table_of,
)
from bench.timing import Call, Clock, Effort, give_back, time_models, warm_up
from bench.workloads import WRONG_ABOVE, relative_error

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
        dtype = workloads.PRECISIONS[self.precision].dtype
        module = self.model.build(self.is_small, dtype, session.device, session.seed)
        return module.train(self.kind == TRAINING)

    def inputs(self, module: nn.Module, session: Session, kind: str, batch: int) -> Inputs:
        """Inputs for it."""
        dtype = workloads.PRECISIONS[self.precision].dtype
        return self.model.inputs_on(module, batch, dtype, kind, session.device, session.seed)

    def contenders(self, session: Session) -> list[Contender]:
        """Those that are measured. CUDA graphs, whose capturing takes long, have the kernels of those without.

        They are timed where a limit is about them: in forward passes of 16 bits.
        """
        has_graphs = self.kind == FORWARD and workloads.PRECISIONS[self.precision].dtype.itemsize == 2
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


PASSES = (FORWARD, TRAINING)
SMALL_BATCH, FULL_BATCH = "small", "full"
PRECISIONS = ("bf16", "fp32")
# A model's need of memory and time beside the others', roughly: the MLPs are small, and Llama has most parameters.
SIZES = {"DLRM bottom MLP": 0.1, "DLRM top MLP": 0.1, "Llama 1B": 2.0, "Llama 1B, one token": 2.0}
# First guesses of what a forward pass in bf16 takes: its compilations, of a large model and of a small one.
CASE_S, SMALL_CASE_S = 45.0, 5.0


def cases_of_model(model: Model, is_small: bool) -> Iterator[Case]:
    """A model's cases: times first, the smaller batch before the larger."""
    batches = model.batches.reduced() if is_small else model.batches

    def case(kind: str, precision: str, batch: int, load: str) -> Case:
        """`load` tells a small batch from one that fills the card."""
        size = 4.0 if kind == TRAINING else 2.0 if load == FULL_BATCH else 1.0
        weight = size * (2.0 if precision == "fp32" else 1.0) * SIZES.get(model.name, 1.0)
        return Case(
            model.name,
            kind,
            f"batch {batch}",
            precision,
            Subject(model, kind, precision, batch, is_small).prepare,
            weight * (SMALL_CASE_S if is_small else CASE_S),
            {"load": load},
            model.package,
            needs_grad=kind == TRAINING,
        )

    for precision in PRECISIONS:
        yield case(FORWARD, precision, batches.small, SMALL_BATCH)
        yield case(FORWARD, precision, batches.forward, FULL_BATCH)
        if batches.training is not None:
            yield case(TRAINING, precision, batches.training, FULL_BATCH)
    yield case(COMPILATION, "bf16", batches.small, SMALL_BATCH)
    for precision in PRECISIONS:
        yield case(ERRORS, precision, batches.small, SMALL_BATCH)


def all_cases(is_small: bool) -> list[Case]:
    """Those of every model, installed or not, in the order in which they are run."""
    return [case for model in MODELS for case in cases_of_model(model, is_small)]


# Figures of a contender, by their names in the results file.
GPU, WALL, COLD, GRAPHS, ERROR, GRADIENT_ERROR = "gpu_us", "wall_us", "cold_s", "graphs", "error", "gradient_error"
FIGURES = {
    GPU: "GPU time",
    WALL: "wall time",
    COLD: "compile time",
    GRAPHS: "graphs of five batch sizes",
    ERROR: "error of outputs",
    GRADIENT_ERROR: "error of gradients",
}
MORE_S = 1.0  # A compilation may take so much more, or a tenth.
UNTRAINED = {model.name for model in MODELS if model.batches.training is None}


def over(own: Contender, rivals: Sequence[Contender], name: str, case: Figures) -> float | None:
    """A figure of the one over the least of the others'; None where one was not measured."""
    others = [figure_of(case, contender.name, name) for contender in rivals]
    return None if None in others else quotient(figure_of(case, own.name, name), min(others))


def goal(
    kind: str,
    name: str,
    own: Contender,
    rivals: Sequence[Contender],
    at_most: float,
    measure: str = WORST,
    precision: str = "",
    load: str = "",
    allowed: Callable[[Figures], float] | None = None,
) -> Goal:
    """A figure of `own` over the least of `rivals` is to be `at_most`, in one kind of cases."""

    left_out = UNTRAINED if name == GRADIENT_ERROR else ()
    covers = cases_with(lambda case: case["group"] not in left_out, variant=kind, precision=precision, load=load)
    graphs = "CUDA graphs" if own == CUTFUSE_GRAPHS else ""
    parts = (kind if kind in PASSES else "", precision, f"{load} batch" if load else "", graphs, FIGURES[name])
    what = ", ".join(part for part in parts if part)
    against = rivals[0].label if len(rivals) == 1 else "faster of both"
    return Goal(what, against, covers, partial(over, own, rivals, name), at_most, measure, allowed=allowed)


def timed_goals(name: str) -> tuple[Goal, ...]:
    """The limits on times, of the device and of the wall clock alike."""
    return (
        goal(FORWARD, name, CUTFUSE, FASTER, 0.93, MEAN, "bf16"),
        goal(FORWARD, name, CUTFUSE, FASTER, 1.01, WORST, "bf16"),
        goal(FORWARD, name, CUTFUSE_GRAPHS, FASTER_GRAPHS, 0.93, MEAN, "bf16"),
        goal(FORWARD, name, CUTFUSE_GRAPHS, FASTER_GRAPHS, 1.01, WORST, "bf16"),
        goal(FORWARD, name, CUTFUSE, FASTER, 0.45, MEAN, "fp32", FULL_BATCH),
        goal(FORWARD, name, CUTFUSE, FASTER, 0.80, WORST, "fp32", FULL_BATCH),
        goal(FORWARD, name, CUTFUSE, FASTER, 1.01, WORST, "fp32", SMALL_BATCH),
        goal(TRAINING, name, CUTFUSE, FASTER, 0.96, MEAN, "bf16"),
        goal(TRAINING, name, CUTFUSE, FASTER, 0.45, MEAN, "fp32"),
    )


def allowed_compilation(case: Figures) -> float:
    """A tenth more than torch.compile takes, or a second."""
    other = figure_of(case, COMPILE.name, COLD)
    return max(1.10, 1.0 + MORE_S / other) if other else 1.10


GOALS = (
    *(own for pair in zip(timed_goals(GPU), timed_goals(WALL), strict=True) for own in pair),
    goal(COMPILATION, COLD, CUTFUSE, (COMPILE,), 1.10, allowed=allowed_compilation),
    goal(COMPILATION, GRAPHS, CUTFUSE, (COMPILE,), 1.0),
    goal(ERRORS, ERROR, CUTFUSE, (EAGER,), 1.1),
    goal(ERRORS, GRADIENT_ERROR, CUTFUSE, (EAGER,), 1.1),
)


def times_text(name: str, case: Figures) -> str:
    """A contender's milliseconds: of the device, and of the wall clock."""
    entry = case["contenders"].get(name)
    if entry is None or GPU not in entry:
        return figure(entry, GPU, str)
    return " / ".join(microseconds(1e-3 * entry[key]) for key in (GPU, WALL))


def quotients_text(own: Contender, rivals: Sequence[Contender], case: Figures) -> str:
    """The ratios of both times."""
    found = [over(own, rivals, name, case) for name in (GPU, WALL)]
    return MISSING if None in found else " / ".join(map(ratio, found))


def figures_of(name: str, contenders: Sequence[Contender], text: Callable[[Any], str]) -> dict[str, Any]:
    """The columns of a figure of some contenders."""
    return {f"{FIGURES[name]}: {own.label}": of(own.name, name, text) for own in contenders}


def errors_table(name: str) -> Callable[[Results], Table]:
    """Makes the table of errors against fp64, with cutfuse's ratio to eager's."""
    own = {"cutfuse / eager": ratio_of(partial(over, CUTFUSE, (EAGER,), name))}
    columns = {**own, **figures_of(name, (EAGER, COMPILE, CUTFUSE), error)}
    return table_of(f"Relative errors against fp64, {FIGURES[name]}", columns, cases_with(variant=ERRORS))


def fusion_table(results: Results) -> Table:
    """What became of every product of every model."""
    columns = {
        "model": "model",
        "products, N x K": lambda row: "; ".join(row["layers"]),
        "fused": lambda row: "yes" if row["fused"] else "no",
        "program": "program",
        "ended at": "ended_at",
        "reason": "reason",
        "cases": "cases",
    }
    return case_table("What became of each product", results["fusion"], columns)


def notes(results: Results) -> list[str]:
    """Of a run: how many processes compiled, which contenders ran without CUDA graphs, which models are missing."""
    lines = []
    # Of the cases, as those of a file may come from runs with more processes and with fewer.
    jobs = max((case.get("jobs", 1) for case in results["cases"]), default=1)
    if jobs > 1:
        others = f"up to {jobs - 1} other processes" if jobs > 2 else "at most one other process"
        lines.append(f"Compile times were measured while {others} compiled, those of both compilers alike.")
    if not results["machine"].get("capability"):
        lines.append("On a CPU both compilers call PyTorch's operations, as a C++ compiler would take minutes.")
    missing = [remark_on(package) for package in PACKAGES if results["machine"].get(package) is None]
    without: dict[str, list[str]] = {}
    for case in results["cases"]:
        for name, entry in case["contenders"].items():
            if "without_graphs" in entry:
                without.setdefault(name, []).append(title_of(case))
    lines += [
        f"{CONTENDERS[name].label}: Inductor did without them in {'; '.join(titles)}."
        for name, titles in without.items()
    ]
    return [*lines, *missing]


def derived(results: Results) -> Results:
    """The table of what was fused, which a summary keeps in place of every product."""
    has_products = any("products" in case for case in results["cases"])
    return {"fusion": [*fusion_rows(results["cases"])] if has_products else results.get("fusion", [])}


SUITE = Suite(
    name="models",
    cases=lambda is_small, is_quick, seed: all_cases(is_small or is_quick),
    goals=GOALS,
    contenders=tuple(CONTENDERS),
    left_out=without_graphs,
    tables=(
        table_of(
            "Times in milliseconds: GPU / wall",
            {
                "cutfuse / faster of both": partial(quotients_text, CUTFUSE, FASTER),
                "with CUDA graphs": partial(quotients_text, CUTFUSE_GRAPHS, FASTER_GRAPHS),
                "products fused": "fused",
                **{f"{own.label} ms": partial(times_text, name) for name, own in CONTENDERS.items()},
            },
            cases_with(variant=PASSES),
        ),
        table_of(
            "Compilation",
            {
                **figures_of(COLD, (COMPILE, CUTFUSE), "{:.1f} s".format),
                **figures_of(GRAPHS, (COMPILE, CUTFUSE), str),
            },
            cases_with(variant=COMPILATION),
        ),
        errors_table(ERROR),
        errors_table(GRADIENT_ERROR),
        fusion_table,
    ),
    about=[
        "GPU: the device's time of a call that is queued behind other work. Wall: from the call until its result is "
        "there. Medians; contenders in turns, in random order, weights and inputs shared.",
        "Faster of both: of eager and torch.compile, each of the two times by itself; with CUDA graphs, of eager and "
        "torch.compile with them.",
        "A training step is the forward pass in train mode with the configuration's dropout, the backward pass and a "
        'fused AdamW. Parameters are of the precision\'s own type, without autocast; fp32 is at "highest", and '
        "convolutions are in fp32 too.",
        "One token: against a static cache of 2048 positions, which holds 2047. Language models give the logits of the "
        "last word, and in training their loss. The MLPs' small batch is 2048.",
        "Compile time: the first call of a small batch in bf16, without caches; up to a second more is within the "
        "limit. Graphs: of the small model with five batch sizes. Errors: of a small batch in eval mode, of all "
        "gradients together.",
    ],
    notes=notes,
    plots=("models",),
    effort=Effort(5.0, 7, 100),
    quick_effort=Effort(0.1, 3, 20),
    time_limit_s=4 * 3600.0,
    derived=derived,
)
