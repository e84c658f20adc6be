"""The fp32 suite's cases: products of fp32 matrices on 16-bit tensor cores, beside PyTorch's at "highest"."""

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
from bench.cases import Case, Shape, dimensions, product_work, random_tensor, reference_cases
from bench.ceilings import Work
from bench.workloads import Reference, Workload, product_reference, product_rows

# The mode of cutfuse's products in this suite: PyTorch's "highest".
MODE: str | None = None
FORCED = "split6"

PLAIN, KEPT = "cutfuse", "cutfuse-kept"
CUBLAS = "mm"
PYTORCH = ("eager", "compile", "max-autotune")

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
TRAINING_SHAPE, TRAINING_SMALL = (4096, 8192, 8192), (32, 64, 64)  # M, N, K; N = K
FORCED_SHAPE, FORCED_SMALL = (1024, 8192, 8192), (16, 64, 64)


def in_mode(workload: Workload, mode: str | None) -> Workload:
    """The same with cutfuse's products in `mode`."""

    def within(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Tensor) -> Any:
            with cutfuse.precision(mode):
                return call(*arguments)

        return run

    return replace(workload, fused=within(workload.fused), explain=within(workload.explain))


def build_model(build: Callable[[torch.device], Workload], device: torch.device) -> Workload:
    """A reference model, once as it is and once prepared, with the same weight."""
    plain = build(device)
    prepared = copy.copy(plain.fused).prepare(MODE)
    kept = replace(plain, fused=prepared, explain=lambda: cutfuse.explain(prepared, *plain.arguments))
    return replace(in_mode(plain, MODE), kept=in_mode(kept, MODE))


def product(x: Tensor, weight: Tensor) -> Workload:
    """`x @ weight.T` with nothing after it."""
    reference = product_reference(x, weight)
    return Workload(
        arguments=(x, weight),
        eager=F.linear,
        fused=cutfuse.linear,
        explain=lambda: cutfuse.explain(cutfuse.linear, x, weight),
        reference=reference,
        product=(x, weight),
        product_reference=reference,
    )


def matrices(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """x `[M, K]` and a weight `[N, K]` scaled so that their product is about normal."""
    m, n, k = shape
    weight = random_tensor((n, k), "fp32", device, seed=2).mul_(k**-0.5)
    return random_tensor((m, k), "fp32", device, seed=1), weight


def build_product(shape: Shape, mode: str | None, keeps: bool, device: torch.device) -> Workload:
    """The bare product of `shape` (M, N, K); `keeps` adds it with the weight prepared."""
    plain = product(*matrices(shape, device))
    if not keeps:
        return in_mode(plain, mode)
    x, weight = plain.arguments
    prepared = cutfuse.prepare(weight, mode)
    kept = replace(
        plain,
        fused=lambda x, weight: cutfuse.linear(x, prepared),
        explain=lambda: cutfuse.explain(cutfuse.linear, x, prepared),
    )
    return replace(in_mode(plain, mode), kept=in_mode(kept, mode))


def stacked_rows(products: Sequence[tuple[Tensor, Tensor]], start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` in fp64 of `a @ b.T` of every pair, one below the other."""
    pieces = []
    for a, b in products:
        rows = a.shape[0]
        if start < rows and stop > 0:
            pieces.append(product_rows(a, b, None, max(start, 0), min(stop, rows)))
        start, stop = start - rows, stop - rows
    return torch.cat(pieces)


def build_training(shape: Shape, device: torch.device) -> Workload:
    """A linear layer's forward and the gradients of its input and its weight; K = N, so that they can be stacked."""
    m, n, k = shape
    scale = m**-0.25  # makes the elements of all three results about 1: their errors weigh alike
    x, weight = matrices(shape, device)
    x.mul_(scale)
    weight.div_(scale)
    gradient = random_tensor((m, n), "fp32", device, seed=3).mul_(scale)

    def step(forward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                y = forward(x, weight)
                return y.detach(), *torch.autograd.grad(y, (x, weight), gradient)

        return run

    def explain() -> Any:
        with torch.enable_grad():
            return cutfuse.explain(cutfuse.linear, x, weight)

    products = [(x, weight), (gradient, weight.t()), (gradient.t(), x.t())]
    workload = Workload(
        arguments=(x.requires_grad_(), weight.requires_grad_()),
        eager=step(F.linear),
        fused=step(cutfuse.linear),
        explain=explain,
        reference=Reference(lambda start, stop: stacked_rows(products, start, stop), 2 * m + n, max(n, k)),
        collect=torch.cat,
    )
    return in_mode(workload, MODE)


def model_cases(small: bool, quick: bool) -> Iterator[Case]:
    """Two of the reference models, with the compilers: they come first, while there is time for these."""
    found = {case.group: case for case in reference_cases(small, quick) if case.precision == "fp32"}
    for name in (RESIDUAL, ROW_SUM):
        case = found[name]
        yield replace(
            case,
            build=partial(build_model, case.build),
            targets=(),  # those of the reference suite
            contenders=(*PYTORCH, PLAIN, KEPT),
        )


def product_case(group: str, shape: Shape, mode: str | None, keeps: bool, effort: float = 1.0) -> Case:
    """A bare product beside cuBLAS's."""
    m, n, k = shape
    return Case(
        group,
        "",
        dimensions(shape),
        "fp32",
        product_work((m, k), (k, n), 4),
        partial(build_product, shape, mode, keeps),
        contenders=(CUBLAS, PLAIN, *([KEPT] if keeps else [])),
        effort=effort,
    )


def training_case(shape: Shape) -> Case:
    """The training step: three products, and every matrix of them read or written once."""
    m, n, k = shape
    inputs = 4 * (m * k + n * k)
    return Case(
        TRAINING,
        "",
        dimensions(shape),
        "fp32",
        Work(inputs + 4 * m * n, inputs + 4 * m * n, 3 * 2 * m * n * k),
        partial(build_training, shape),
        contenders=("eager", PLAIN),
    )


def shapes_of(grid: Grid) -> Iterator[Shape]:
    """M, N, K of every cell."""
    rows, sizes = grid
    return itertools.product(rows, sizes, sizes)


def fp32_cases(small: bool, quick: bool) -> Iterator[Case]:
    """Models, single products, and the two grids; quick ones have fewer cells."""
    yield from model_cases(small, quick)
    yield training_case(TRAINING_SMALL if small else TRAINING_SHAPE)
    yield product_case(FORCED_PRODUCT, FORCED_SMALL if small else FORCED_SHAPE, FORCED, keeps=True)
    for shape in shapes_of(GRID_SMALL if small else GRID_QUICK if quick else GRID):
        yield product_case(PRODUCT, shape, MODE, keeps=True, effort=CELL_EFFORT)
    for shape in shapes_of(SKINNY_SMALL if small else SKINNY_QUICK if quick else SKINNY_GRID):
        yield product_case(SKINNY, shape, MODE, keeps=False, effort=CELL_EFFORT)
