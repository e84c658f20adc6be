"""The fit suite: layers drawn at random by every kernel that takes them and by cuBLAS, for the planner's tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench import fit
from bench.fit import PRODUCT, UNFUSED, Layer, Sample, Samples, is_kernel
from bench.goals import MEAN, TARGET_DEVICE, WORST, cases_with
from bench.launches import check_all, interleaved
from bench.suite import Case, Figures, Goal, Results, Session, Suite, Turn
from bench.tables import MISSING, microseconds, of, table_of, times_of
from bench.timing import Effort
from bench.workloads import Range, dimensions, drawn_shapes, random_tensor
from cutfuse import native
from cutfuse.epilogue import Program, evaluate
from cutfuse.layer.call_plans import given_to, linear_call
from cutfuse.layer.planner import LinearArguments, plan_linear

PRECISION, MODE = "bf16", "tf32"  # the planner's name of 16-bit products' one precision
ROWS, SIZES, COUNT = Range(16, 16384), Range(256, 12288), 800
SMALL_ROWS, SMALL_SIZES, FEW = Range(1, 16), Range(16, 64), 8
FOLLOWING = (
    ("operands=0; relu z", "none"),
    ("operands=0; gelu z", "none"),
    ("operands=1; add z r0", "none"),
    ("operands=0; gelu z", "sum"),
)
MEAN_AT_MOST, WORST_AT_MOST = 1.03, 1.15
KERNEL = "fused kernels"
CONTENDERS = (KERNEL, PRODUCT, UNFUSED)
EFFORT = Effort(0.6, 5, 20)

Launches = dict[str, Callable[[], Any]]


def launches_of(layer: Layer, device: torch.device) -> Launches:
    """Every way of computing the layer by its name, and cuBLAS's product alone; on the CPU PyTorch's own."""
    m, n, k = layer.m, layer.n, layer.k
    x, weight = (random_tensor(shape, PRECISION, device, seed) for seed, shape in enumerate(((m, k), (n, k))))
    program = Program.parse(layer.program)
    operands = [random_tensor((m, n), PRECISION, device, 2 + place) for place in range(program.operand_count)]
    arguments = LinearArguments(x, weight, None, operands, program, layer.reduction, x.dtype)
    found: Launches = {PRODUCT: lambda: F.linear(x, weight)}
    if device.type != "cuda":

        def unfused() -> Tensor:
            y = evaluate(program, F.linear(x, weight), operands)
            return y if layer.reduction == "none" else y.sum(-1)

        return {**found, UNFUSED: unfused}
    for way in plan_linear(arguments, MODE).alternatives:
        if not way.rejection:
            call = linear_call(plan_linear(arguments, MODE, only=way.name), arguments)
            found[way.name] = partial(call.run, *given_to(arguments))
    return found


def prepare(layer: Layer, session: Session) -> Turn:
    """Compiles what follows the product into each kernel, and gives what times all ways."""

    def check(way: str, _: Figures) -> Callable[[], Any]:
        launches[way]()
        return launches[way]

    with cutfuse.specialization("now"):
        launches = launches_of(layer, session.device)
        names = [way for way in launches if (KERNEL if is_kernel(way) else way) in session.contenders]
        checked = check_all(session, names, check)

    def timed() -> Figures:
        with cutfuse.specialization("now"):
            return interleaved(checked)

    return timed


def fit_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """Other layers for each seed; what follows the product in turn."""
    ranges = (SMALL_ROWS, SMALL_SIZES) if small else (ROWS, SIZES)
    shapes = drawn_shapes(FEW if small or quick else COUNT, *ranges, odd_ones=False, seed=seed)
    for number, ((m, n, k), (program, reduction)) in enumerate(zip(shapes, cycle(FOLLOWING))):
        layer = Layer(m, n, k, program, reduction)
        variant = f"{number:03} {layer.program}, {layer.reduction}"
        about = {"layer": list(astuple(layer))}
        yield Case(
            "layer", variant, dimensions((m, n, k)), PRECISION, partial(prepare, layer), seconds=1.4, about=about
        )


def sample_of(case: Figures) -> Sample:
    """What was measured of a layer. A time that the host may be a part of is left out."""
    entries = case["contenders"]
    times = {way: own["median_us"] for way, own in entries.items() if "median_us" in own and not own.get("late")}
    return Sample(Layer(*case["layer"]), times)


def samples_of(results: Results) -> Samples:
    """What a run measured, for the fit."""
    machine = results["machine"]
    samples = [sample_of(case) for case in results["cases"]]
    return fit.measured_anew(str(machine["device"]), machine.get("multiprocessors", 0), samples)


def over_best(case: Figures) -> float | None:
    """The time of the way that the module's table for an H200 chooses over that of the fastest one."""
    multiprocessors, gigabytes, numbers = native.core.device_times()[TARGET_DEVICE]
    sample = sample_of(case)
    samples = Samples(TARGET_DEVICE, multiprocessors, gigabytes, (), {}, numbers, [sample])
    return next((one.loss for one in fit.choices(samples, {}, with_cublas=True)), None)


def fastest(case: Figures) -> str:
    """The fastest way of computing a layer."""
    own = {way: entry["median_us"] for way, entry in case["contenders"].items() if "median_us" in entry}
    own.pop(PRODUCT, None)
    return min(own, key=lambda way: own[way]) if own else MISSING


def finish(results: Results) -> list[str]:
    """Write the samples and the table of the device; gives what the choice by it loses."""
    samples = samples_of(results)
    path = fit.samples_path(samples.device)
    samples.save(path)
    samples = Samples.load(path)  # rounded, as `refit` reads them
    lines = [f"**{table.title}**\n\n{table.markdown()}" for table in fit.held_out_tables(samples)]
    written = fit.write_table(samples)
    return [*lines, f"Samples: {Path(os.path.relpath(path))}. Table: {written}. Build the module again to plan by it."]


SUITE = Suite(
    name="fit",
    cases=fit_cases,
    goals=tuple(
        Goal("chosen way", "fastest", cases_with(), over_best, limit, measure)
        for measure, limit in ((MEAN, MEAN_AT_MOST), (WORST, WORST_AT_MOST))
    ),
    contenders=CONTENDERS,
    tables=(
        table_of(
            "Every layer",
            {
                "fastest": fastest,
                "its us": lambda case: of(fastest(case), "median_us", microseconds)(case),
                **times_of({UNFUSED: UNFUSED}),
            },
        ),
    ),
    about=(
        f"M of {ROWS.least} to {ROWS.most}, N and K of {SIZES.least} to {SIZES.most}, drawn by the seed; medians of "
        "single launches from a cold cache, all ways of a layer in turns.",
        "A whole run writes the device's samples and its table, and says what the choice by a fit to half of the "
        "layers loses for the other half.",
    ),
    effort=EFFORT,
    time_limit_s=1140.0,
    compiles=False,
    finish=finish,
)
