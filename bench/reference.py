"""The reference suite: five models, with a product and without one, and the least time that each needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import workloads
from bench.ceilings import Work
from bench.contenders import COMPILERS, CONTENDERS, EAGER, FUSED, MM, slow_compilers
from bench.goals import cases_with, every, over, share_of_error
from bench.launches import launch_case
from bench.suite import Case, Goal, Results, Suite
from bench.tables import Table, case_table, error, microseconds, of, ratio_of, times_of
from bench.workloads import Shape, Workload, dimensions, element_size, random_tensor
from cutfuse.demo import FULL_SIZE

NAMES = (MM, EAGER, *COMPILERS, FUSED)
BEST_COMPILED = "best torch.compile"


@dataclass(frozen=True)
class Target:
    """cutfuse's time over that of `against` is to be `at_most`."""

    against: str
    at_most: float


AT_PAR = Target(BEST_COMPILED, 1.02)
NEAR_PRODUCT = Target("torch.mm", 1.06)


def product_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """A product whose whole result is written."""
    (m, k), n = shape, arguments[1]
    return Work((m * k + n * k) * element, m * n * element, 2 * m * n * k)


def product_row_sum_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """A product of which only one number a row is written."""
    return replace(product_work(shape, arguments, element), written_bytes=shape[0] * element)


def affine_row_sum_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """Row sums of a product that is only scaled need two matrix-vector products: memory, no arithmetic to speak of."""
    return replace(product_row_sum_work(shape, arguments, element), flops=0)


def stream_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """One read and one write of each element."""
    del arguments
    return Work(math.prod(shape) * element, math.prod(shape) * element)


def reduce_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """One read of each element, the dimension `arguments[0]` written as one."""
    return Work(math.prod(shape) * element, math.prod(shape) // shape[arguments[0]] * element)


@dataclass(frozen=True)
class Model:
    """A reference model: x's shape and the constructor's arguments at the small size, and what follows its product.

    `cutfuse.demo` has the full sizes.
    """

    name: str
    small: tuple[Shape, tuple[Any, ...]]
    tail: Callable[[Tensor], Tensor]
    work: Callable[[Shape, tuple[Any, ...], int], Work]
    precisions: tuple[str, ...]
    targets: dict[str, tuple[Target, ...]] = field(default_factory=dict)

    def size(self, small: bool) -> tuple[Shape, tuple[Any, ...]]:
        """x's shape and the constructor's arguments."""
        full = next(case for case in FULL_SIZE if case.name == self.name)
        return self.small if small else (full.shape, full.arguments)

    def targets_at(self, precision: str) -> tuple[Target, ...]:
        """The targets at `precision`: at par with torch.compile, unless one of its own asks for more."""
        own = self.targets.get(precision, ())
        return own if any(target.against == BEST_COMPILED for target in own) else (AT_PAR, *own)

    def build(self, small: bool, precision: str, device: torch.device) -> Workload:
        """The model at one size and precision, and its drop-in."""
        torch.manual_seed(0)
        shape, arguments = self.size(small)
        x = random_tensor(shape, precision, device, seed=1)
        return workloads.reference_model(self.name, arguments, self.tail, x, device)

    def key(self, small: bool, precision: str) -> tuple[str, str, str, str]:
        """The case's key, with the shape as M x N x K where it has a product."""
        shape, arguments = self.size(small)
        printed = (shape[0], arguments[1], shape[1]) if len(arguments) > 1 else shape
        return self.name, "", dimensions(printed), precision

    def least_work(self, small: bool, precision: str) -> Work:
        """The least that a case must move and compute."""
        return self.work(*self.size(small), element_size(precision))


ALL_PRECISIONS = ("fp32", "bf16", "tf32", "fp16")
NO_PRODUCT_PRECISIONS = ("fp32", "bf16", "fp16")
MODELS = (
    Model(
        "LinearSigmoidSum",
        small=((32, 1024), (1024, 1024)),
        tail=lambda z: torch.sigmoid(z).sum(1, keepdim=True),
        work=product_row_sum_work,
        precisions=ALL_PRECISIONS,
        targets={"bf16": (NEAR_PRODUCT,)},
    ),
    Model(
        "Sigmoid",
        small=((256, 8192), ()),
        tail=torch.sigmoid,
        work=stream_work,
        precisions=NO_PRODUCT_PRECISIONS,
    ),
    Model(
        "GemmDivideSumScale",
        small=((128, 512), (512, 512, 1.5)),
        tail=lambda z: (z / 2).sum(1, keepdim=True) * 1.5,
        work=affine_row_sum_work,
        precisions=ALL_PRECISIONS,
        targets={"fp32": (Target(BEST_COMPILED, 1 / 15),), "bf16": (Target(BEST_COMPILED, 1 / 3),)},
    ),
    Model(
        "SumReduction",
        small=((8, 512, 511), (1,)),
        tail=lambda x: x.sum(1, keepdim=True),
        work=reduce_work,
        precisions=NO_PRODUCT_PRECISIONS,
    ),
    Model(
        "GemmSigmoidScaleResidual",
        small=((128, 512), (512, 512, 2.0)),
        tail=lambda z: torch.sigmoid(z) * 2.0 + z,
        work=product_work,
        precisions=ALL_PRECISIONS,
        targets={"bf16": (NEAR_PRODUCT,)},
    ),
)


def reference_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """The reference models. fp16, for which no target of its own is stated, comes last: it is left out first."""
    del quick, seed
    for precision in ALL_PRECISIONS:
        for model in MODELS:
            if precision in model.precisions and not (small and precision == "tf32"):
                build, work = partial(model.build, small, precision), model.least_work(small, precision)
                yield launch_case(model.key(small, precision), build, NAMES, work)


# cutfuse's time over the faster of torch.compile and max-autotune, and over the bare product's.
over_compiled, over_product = over((FUSED,), COMPILERS), over((FUSED,), (MM,))


def goal_of(model: Model, precision: str, target: Target) -> Goal:
    """A model's target at one precision."""
    covers = cases_with(group=model.name, precision=precision)
    value = over_compiled if target.against == BEST_COMPILED else over_product
    return Goal(f"{model.name}, {precision}", target.against, covers, value, target.at_most)


GOALS = (
    *(
        goal_of(model, precision, target)
        for model in MODELS
        for precision in model.precisions
        for target in model.targets_at(precision)
    ),
    Goal(
        "error against fp64",
        "eager's error and one rounding",
        every,
        partial(share_of_error, own=FUSED, base=EAGER),
        1.0,
    ),
)


def times_table(results: Results) -> Table:
    """Every case with its ratios, its times and its errors."""
    columns = {
        "model": "group",
        "precision": "precision",
        "cutfuse / torch.compile": ratio_of(over_compiled),
        "cutfuse / torch.mm": ratio_of(over_product),
        "shape": "shape",
        "floor us": lambda case: microseconds(case.get("floor_us")),
        **times_of({name: CONTENDERS[name].label for name in NAMES}),
        **{f"error {name}": of(name, "error", error) for name in (EAGER, FUSED)},
    }
    return case_table("Times", results["cases"], columns)


SUITE = Suite(
    name="reference",
    cases=lambda *kind: list(reference_cases(*kind)),
    goals=GOALS,
    contenders=NAMES,
    left_out=slow_compilers,
    tables=lambda results: [times_table(results)],
    about=["Medians in microseconds; errors are relative, against fp64. The best torch.compile may be max-autotune."],
    plots=("reference",),
    time_limit_s=240.0,
    judges_quick=True,
)
