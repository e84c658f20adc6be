"""The reference suite: five models, with a product and without one, and the least time that each needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cutfuse
from bench.goals import cases_with, over, share_of_error
from bench.launches import COMPILERS, CONTENDERS, EAGER, FUSED, MM, launch_case, slow_compilers
from bench.suite import Case, Goal, Suite
from bench.tables import error, microseconds, of, ratio_of, table_of, times_of
from bench.workloads import Reference, Shape, Work, Workload, dimensions, element_size, product_rows, random_tensor
from cutfuse.demo import FULL_SIZE

NAMES = (MM, EAGER, *COMPILERS, FUSED)


AT_PAR = 1.02  # cutfuse's time over that of the best torch.compile, where a model has no limit of its own


def product_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """A product whose whole result is written."""
    (m, k), n = shape, arguments[1]
    return Work((m * k + n * k) * element, m * n * element, 2 * m * n * k)


def product_row_sum_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """A product of which only one number a row is written."""
    return replace(product_work(shape, arguments, element), written_bytes=shape[0] * element)


@dataclass(frozen=True)
class Model:
    """A reference model: x's shape and the constructor's arguments at the small size, and what follows its product.

    `cutfuse.demo` has the full sizes. compiled, product: by precision, what cutfuse's time is to be at most, over that
    of the best torch.compile and over the bare product's.
    """

    name: str
    small: tuple[Shape, tuple[Any, ...]]
    tail: Callable[[Tensor], Tensor]
    work: Callable[[Shape, tuple[Any, ...], int], Work]
    precisions: tuple[str, ...]
    compiled: dict[str, float] = field(default_factory=dict)
    product: dict[str, float] = field(default_factory=dict)

    def size(self, small: bool) -> tuple[Shape, tuple[Any, ...]]:
        """x's shape and the constructor's arguments."""
        full = next(case for case in FULL_SIZE if case.name == self.name)
        return self.small if small else (full.shape, full.arguments)

    def build(self, small: bool, precision: str, device: torch.device) -> Workload:
        """The model at one size and precision and its drop-in, sharing one set of parameters."""
        torch.manual_seed(0)
        shape, arguments = self.size(small)
        x = random_tensor(shape, precision, device, seed=1)
        with device:
            module = getattr(cutfuse.models, self.name)(*arguments)
        module = module.to(x.dtype).requires_grad_(False).eval()
        with torch.device("meta"):
            fused = getattr(cutfuse.nn, self.name)(*arguments)
        fused.load_state_dict(module.state_dict(), strict=True, assign=True)
        fused.requires_grad_(False).eval()

        parameters = dict(module.named_parameters())
        weight = next((value for key, value in parameters.items() if key.endswith("weight")), None)
        bias = next((value for key, value in parameters.items() if key.endswith("bias")), None)

        def rows(start: int, stop: int) -> Tensor:
            return self.tail(x[start:stop].double() if weight is None else product_rows(x, weight, bias, start, stop))

        per_row = x[0].numel() if weight is None else max(weight.shape[0], x.shape[1])
        return Workload(
            arguments=(x,),
            eager=module,
            fused=fused,
            exact=Reference(rows, x.shape[0], per_row),
            explain=lambda: cutfuse.explain(fused, x),
            product=None if weight is None else (x, weight),
        )

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
        product={"bf16": 1.06},
    ),
    Model(
        "Sigmoid",
        small=((256, 8192), ()),
        tail=torch.sigmoid,
        work=lambda shape, _, element: Work(math.prod(shape) * element, math.prod(shape) * element),
        precisions=NO_PRODUCT_PRECISIONS,
    ),
    Model(
        "GemmDivideSumScale",
        small=((128, 512), (512, 512, 1.5)),
        tail=lambda z: (z / 2).sum(1, keepdim=True) * 1.5,
        # Row sums of a product that is only scaled need two matrix-vector products: no arithmetic to speak of.
        work=lambda *layer: replace(product_row_sum_work(*layer), flops=0),
        precisions=ALL_PRECISIONS,
        compiled={"fp32": 1 / 15, "bf16": 1 / 3},
    ),
    Model(
        "SumReduction",
        small=((8, 512, 511), (1,)),
        tail=lambda x: x.sum(1, keepdim=True),
        work=lambda shape, dims, element: Work(
            math.prod(shape) * element, math.prod(shape) // shape[dims[0]] * element
        ),
        precisions=NO_PRODUCT_PRECISIONS,
    ),
    Model(
        "GemmSigmoidScaleResidual",
        small=((128, 512), (512, 512, 2.0)),
        tail=lambda z: torch.sigmoid(z) * 2.0 + z,
        work=product_work,
        precisions=ALL_PRECISIONS,
        product={"bf16": 1.06},
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


def goals() -> Iterator[Goal]:
    """A model's limits at each precision, and one on every error."""
    for model in MODELS:
        for precision in model.precisions:
            what, covers = f"{model.name}, {precision}", cases_with(group=model.name, precision=precision)
            yield Goal(what, "best torch.compile", covers, over_compiled, model.compiled.get(precision, AT_PAR))
            if precision in model.product:
                yield Goal(what, "torch.mm", covers, over_product, model.product[precision])
    error = partial(share_of_error, own=FUSED, base=EAGER)
    yield Goal("error against fp64", "eager's error and one rounding", cases_with(), error, 1.0)


times_table = table_of(
    "Times",
    {
        "cutfuse / torch.compile": ratio_of(over_compiled),
        "cutfuse / torch.mm": ratio_of(over_product),
        "floor us": lambda case: microseconds(case.get("floor_us")),
        **times_of({name: CONTENDERS[name].label for name in NAMES}),
        **{f"error {name}": of(name, "error", error) for name in (EAGER, FUSED)},
    },
)
SUITE = Suite(
    name="reference",
    cases=reference_cases,
    goals=tuple(goals()),
    contenders=NAMES,
    left_out=slow_compilers,
    tables=(times_table,),
    about=["Medians in microseconds; errors are relative, against fp64. The best torch.compile may be max-autotune."],
    plots=("reference",),
    time_limit_s=240.0,
    judges_quick=True,
)
