"""The fp32 suite: products of fp32 matrices on 16-bit tensor cores, beside PyTorch's at "highest"."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.accuracy_suite import TRADE_OFF, trade_off_case, trade_off_table
from bench.chains import training
from bench.goals import MEAN, WORST, figure_of
from bench.launches import AUTOTUNE, COMPILE, CONTENDERS, EAGER, FUSED, KEPT, MM, launch_case, slow_compilers
from bench.reference import MODELS, product_work
from bench.suite import Case, Figures, Goal, Results, Suite
from bench.tables import MISSING, error, of, table_of, times_of
from bench.tables import ratio as times
from bench.workloads import Run, Shape, Work, Workload, dimensions, product_reference, product_tensors, random_tensor

FORCED = "split6"  # as a mode of `cutfuse.precision`; the others are at PyTorch's own setting, "highest"

PYTORCH = (EAGER, COMPILE, AUTOTUNE)

RESIDUAL, ROW_SUM = "GemmSigmoidScaleResidual", "LinearSigmoidSum"
PRODUCT, SKINNY, TRAINING, FORCED_PRODUCT = "product", "skinny product", "training step", f"{FORCED} product"

CELL_EFFORT = 0.15  # of a case's time, for each of the many cells of a grid

Grid = tuple[Sequence[int], Sequence[int]]  # M, and N and K alike
GRID: Grid = ((128, 512, 1024, 4096, 8192), (1024, 4096, 8192))
GRID_QUICK: Grid = ((128, 1024), (1024, 8192))
GRID_SMALL: Grid = ((8, 16), (32, 64))
SKINNY_GRID: Grid = ((1, 2, 4, 8, 16, 32, 64), (4096, 8192))
SKINNY_QUICK: Grid = ((1, 32), (8192,))
SKINNY_SMALL: Grid = ((1, 4), (64,))
TRAINING_SHAPE, TRAINING_SMALL = (4096, 8192, 8192), (32, 64, 64)  # M, N, K
FORCED_SHAPE, FORCED_SMALL = (1024, 8192, 8192), (16, 64, 64)


def build_model(build: Callable[[torch.device], Workload], device: torch.device) -> Workload:
    """A reference model, once as it is and once prepared, with the same weight."""
    plain = build(device)
    prepared = copy.copy(plain.fused).prepare()
    kept = Run(partial(prepared, *plain.arguments), plain.exact, lambda: cutfuse.explain(prepared, *plain.arguments))
    return replace(plain, extras={KEPT: lambda: kept})


def build_product(shape: Shape, mode: str | None, device: torch.device) -> Workload:
    """The bare product of `shape` (M, N, K) in a mode of `cutfuse.precision`, and with the weight prepared."""
    x, weight = product_tensors(shape, "fp32", device)
    prepared = cutfuse.prepare(weight, mode)
    exact = product_reference(x, weight)

    def product(x: Tensor, weight: Any) -> Tensor:
        with cutfuse.precision(mode):
            return cutfuse.linear(x, weight)

    def explain(weight: Any) -> Any:
        with cutfuse.precision(mode):
            return cutfuse.explain(cutfuse.linear, x, weight)

    return Workload(
        arguments=(x, weight),
        eager=F.linear,
        fused=product,
        exact=exact,
        explain=lambda: explain(weight),
        product=(x, weight),
        extras={KEPT: lambda: Run(partial(product, x, prepared), exact, lambda: explain(prepared))},
    )


def build_training(shape: Shape, device: torch.device) -> Workload:
    """A linear layer's forward and the gradients of its input and its weight."""
    leaves = [tensor.requires_grad_() for tensor in product_tensors(shape, "fp32", device)]
    gradient = random_tensor(shape[:2], "fp32", device, seed=3)

    return training([*leaves, gradient], F.linear, cutfuse.linear)


def product_case(
    group: str,
    shape: Shape,
    mode: str | None = None,
    effort: float = CELL_EFFORT,
    own: Sequence[str] = (FUSED, KEPT),
) -> Case:
    """A bare product beside cuBLAS's."""
    m, n, k = shape
    build = partial(build_product, shape, mode)
    contenders = (MM, *own)
    work = product_work((m, k), (k, n), 4)
    return launch_case((group, "", dimensions(shape), "fp32"), build, contenders, work, effort)


def shapes_of(grid: Grid) -> Iterator[Shape]:
    """M, N, K of every cell."""
    rows, sizes = grid
    return itertools.product(rows, sizes, sizes)


def fp32_suite(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """Models, single products, the two grids, and error against time; quick grids have fewer cells."""
    del seed
    # Two of the reference models, with the compilers: they come first, while there is time for these.
    models = {model.name: model for model in MODELS}
    for model in (models[RESIDUAL], models[ROW_SUM]):
        build = partial(build_model, partial(model.build, small, "fp32"))
        work = model.least_work(small, "fp32")
        yield launch_case(model.key(small, "fp32"), build, (*PYTORCH, FUSED, KEPT), work)
    # Three products, and every matrix of them read or written once.
    m, n, k = shape = TRAINING_SMALL if small else TRAINING_SHAPE
    moved = 4 * (m * k + n * k + m * n)
    work, build = Work(moved, moved, 3 * 2 * m * n * k), partial(build_training, shape)
    yield launch_case((TRAINING, "", dimensions(shape), "fp32"), build, (EAGER, FUSED), work, needs_grad=True)
    yield product_case(FORCED_PRODUCT, FORCED_SMALL if small else FORCED_SHAPE, FORCED, effort=1.0)
    for shape in shapes_of(GRID_SMALL if small else GRID_QUICK if quick else GRID):
        yield product_case(PRODUCT, shape)
    for shape in shapes_of(SKINNY_SMALL if small else SKINNY_QUICK if quick else SKINNY_GRID):
        yield product_case(SKINNY, shape, own=(FUSED,))
    yield trade_off_case(small)


# Where cutfuse runs cuBLAS itself, the two times are of one kernel and differ by noise.
NOISE = 0.98
NAMES = (MM, EAGER, COMPILE, AUTOTUNE, FUSED, KEPT)
RIVALS = {RESIDUAL: PYTORCH, ROW_SUM: PYTORCH, TRAINING: (EAGER,)}  # else cuBLAS
AGAINST = {PYTORCH: "fastest of PyTorch", (EAGER,): "eager", (MM,): "cuBLAS in fp32"}
WEIGHTS = {FUSED: "plain weights", KEPT: "planes kept"}
# The grids of cells, and the contenders whose speed-ups are shown of each.
GRIDS = ((PRODUCT, FUSED), (PRODUCT, KEPT), (SKINNY, FUSED))
OWN_CUBLAS = "*"


def ran_cublas(contender: str, case: Figures) -> bool:
    """Whether the contender's product was PyTorch's own."""
    path: str = case["contenders"][contender].get("path", "")
    return path.partition(":")[0] in ("unfused", "composed")


def speed_up(contender: str, case: Figures) -> float | None:
    """The time of the fastest rival over the contender's; None where one of them was not measured."""
    rivals = [figure_of(case, name) for name in RIVALS.get(case["group"], (MM,))]
    own = figure_of(case, contender)
    return None if own is None or None in rivals else min(filter(None, rivals)) / own


def goal(group: str, contender: str, at_least: float, measure: str = "") -> Goal:
    """A group is to be `at_least` as many times as fast with the contender: a single case, or the cells of a grid."""

    def allowed(case: Figures) -> float:
        return at_least * NOISE if measure == WORST and ran_cublas(contender, case) else at_least

    return Goal(
        f"{group}, {WEIGHTS[contender]}",
        AGAINST[RIVALS.get(group, (MM,))],
        lambda case: case["group"] == group,
        partial(speed_up, contender),
        at_least,
        measure or WORST,
        is_least=True,
        allowed=allowed,
    )


GOALS = (
    goal(RESIDUAL, KEPT, 4.0),
    goal(RESIDUAL, FUSED, 4.0),
    goal(ROW_SUM, KEPT, 4.0),
    goal(ROW_SUM, FUSED, 3.0),
    goal(PRODUCT, FUSED, 3.5, MEAN),
    goal(PRODUCT, FUSED, 1.0, WORST),
    goal(PRODUCT, KEPT, 3.5, MEAN),
    goal(PRODUCT, KEPT, 1.0, WORST),
    goal(SKINNY, FUSED, 1.0, WORST),
    goal(TRAINING, FUSED, 3.0),
    goal(FORCED_PRODUCT, KEPT, 2.2),
    goal(FORCED_PRODUCT, FUSED, 2.2),
)


def speed_up_text(contender: str, case: Figures) -> str:
    """A speed-up with a mark where cutfuse ran cuBLAS itself."""
    value = speed_up(contender, case)
    return MISSING if value is None else times(value) + OWN_CUBLAS * ran_cublas(contender, case)


def cells_of(results: Results, group: str, contender: str) -> dict[tuple[int, str], tuple[float, bool]]:
    """A grid's speed-ups, and whether cutfuse ran cuBLAS itself, by M and "NxK"."""
    found = {}
    for case in results["cases"]:
        value = speed_up(contender, case) if case["group"] == group else None
        if value is not None:
            m, rest = case["shape"].split("x", 1)
            found[int(m), rest] = (value, ran_cublas(contender, case))
    return found


SUITE = Suite(
    name="fp32",
    cases=fp32_suite,
    goals=GOALS,
    contenders=NAMES,
    left_out=slow_compilers,
    tables=(
        table_of(
            "Times as fast as the fastest of PyTorch",
            {
                **{f"times as fast, {label}": partial(speed_up_text, name) for name, label in WEIGHTS.items()},
                **times_of({name: CONTENDERS[name].label for name in NAMES}),
                "error": of(FUSED, "error", error),
            },
            lambda case: case["group"] != TRADE_OFF,
        ),
        trade_off_table,
    ),
    about=[
        'PyTorch is at "highest" throughout: its products are cuBLAS in fp32. Medians in microseconds of one '
        "interleaved run; errors are relative, against fp64. The ratio is the fastest rival's time over cutfuse's.",
        f"{OWN_CUBLAS}: cutfuse ran cuBLAS itself. There the two times are of one kernel, and {NOISE} counts as 1. The "
        f"worst cell is the one furthest below its limit; the {MEAN} takes every cell as measured.",
    ],
    plots=("fp32", "error-and-time"),
    time_limit_s=240.0,
)
