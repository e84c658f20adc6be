"""The models suite: whole models through torch.compile, with cutfuse and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.goals import MEAN, WORST, cases_with, figure_of, quotient
from bench.model_run import (
    COMPILATION,
    COMPILE,
    CONTENDERS,
    CUTFUSE,
    CUTFUSE_GRAPHS,
    EAGER,
    ERRORS,
    FASTER,
    FASTER_GRAPHS,
    Contender,
    Subject,
    fusion_rows,
    without_graphs,
)
from bench.model_zoo import FORWARD, MODELS, PACKAGES, TRAINING, Model, remark_on
from bench.suite import Case, Figures, Goal, Results, Suite, title_of
from bench.tables import MISSING, Table, case_table, error, figure, microseconds, of, ratio, ratio_of, table_of
from bench.timing import Effort

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
