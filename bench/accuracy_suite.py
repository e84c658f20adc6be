"""The accuracy of fp32 products against fp64, held to what PyTorch's own fp32 has: the contract of "guarded".

Every distribution, at several depths, as a product and as the two products of a backward pass; and, at one size, what
each precision costs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import cutfuse
from bench.distributions import BY_NAME, DISTRIBUTIONS, Distribution
from bench.progress import Progress
from bench.runner import one_line
from bench.timing import Effort, clock_for, interleave
from bench.workloads import PRECISIONS

CUBLAS = "cuBLAS fp32"
GUARDED = "guarded"
BF16 = "bf16"
# cutfuse's contenders, with the mode of `cutfuse.precision`; PyTorch's own setting is "guarded" throughout.
MODES: dict[str, str | None] = {GUARDED: "guarded", "split3": "split3", "split6": "split6", "tf32": "tf32"}
CONTENDERS = (CUBLAS, *MODES, BF16)
# Of the error against the time: with cuBLAS's tf32 and bf16, as what PyTorch has to offer.
CUBLAS_TF32 = "cuBLAS tf32"
TRADE_OFF_CONTENDERS = (CUBLAS, GUARDED, "split3", "split6", CUBLAS_TF32, BF16)

# The contract: cutfuse's error at "guarded" over cuBLAS fp32's.
MEAN_AT_MOST = 0.8  # the geometric mean over all cells
WORST_AT_MOST = 2.1  # any cell
# The mean counts a smaller ratio as this, so that a few cells without an error do not carry it.
LEAST_RATIO = 0.01

DEPTHS = (64, 1000, 8192, 32768)
BACKWARD_DEPTHS = (1000,)
SMALL_DEPTHS = (64, 1000)
SIZES, SMALL_SIZES = (1024, 2048), (48, 80)  # M, N
TRADE_OFF_SHAPE, SMALL_TRADE_OFF_SHAPE = (1024, 8192, 8192), (64, 256, 256)  # M, N, K


@dataclass(frozen=True)
class Errors:
    """Of one result against fp64: the relative Frobenius norm, and of |d| / (|x| |weight|.T) the largest and the mean.

    Infinite where the result holds an infinity or NaN.
    """

    frobenius: float
    largest: float
    mean: float


MEASURES = ("frobenius", "largest", "mean")


@dataclass(frozen=True)
class Exact:
    """A product in fp64, and the product of the absolute values, both `[M, N]`."""

    product: Tensor
    magnitude: Tensor

    @staticmethod
    def of(x: Tensor, weight: Tensor) -> Exact:
        """Of x `[M, K]` and weight `[N, K]`."""
        wide = weight.double().t()
        return Exact(x.double() @ wide, x.double().abs() @ wide.abs())


def frobenius_error(result: Tensor, product: Tensor) -> float:
    """The Frobenius norm of the difference over the product's; infinite where there is a difference to nothing."""
    norm, difference = product.norm().item(), (result.double() - product).norm().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else math.inf if difference else 0.0


def measure(result: Tensor, exact: Exact) -> Errors:
    """The errors of `result` `[M, N]`; raises ValueError where it has another shape."""
    if result.shape != exact.product.shape:
        raise ValueError(f"the result has shape {tuple(result.shape)}, the exact product {tuple(exact.product.shape)}")
    if not result.isfinite().all():
        return Errors(math.inf, math.inf, math.inf)
    difference = (result.double() - exact.product).abs()
    relative = difference / exact.magnitude
    relative[difference == 0] = 0.0  # where the magnitude is 0 too
    return Errors(frobenius_error(result, exact.product), relative.max().item(), relative.mean().item())


def product(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` by a contender: x `[M, K]`, weight `[N, K]`."""
    if name == CUBLAS:
        return torch.mm(x, weight.t())
    if name == CUBLAS_TF32:
        with PRECISIONS["tf32"].active():
            return torch.mm(x, weight.t())
    if name == BF16:
        return cutfuse.linear(x.bfloat16(), weight.bfloat16())
    with cutfuse.precision(MODES[name]):
        return cutfuse.linear(x, weight)


def product_as_dx(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """The same as the gradient of a linear layer's input: x is the gradient that arrives, K the layer's outputs."""
    layer = weight.t().contiguous()
    if name == CUBLAS:
        return torch.mm(x, layer)
    inputs = torch.zeros(x.shape[0], layer.shape[1], device=x.device, requires_grad=True)
    y = product(name, inputs, layer)
    return torch.autograd.grad(y, inputs, x.to(y.dtype))[0]


def product_as_dw(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """The same as the gradient of a linear layer's weight: x.T is the gradient that arrives, K the layer's rows."""
    gradient, inputs = x.t().contiguous(), weight.t().contiguous()
    if name == CUBLAS:
        return torch.mm(gradient.t(), inputs)
    layer = torch.zeros(x.shape[0], inputs.shape[1], device=x.device, requires_grad=True)
    y = product(name, inputs, layer)
    return torch.autograd.grad(y, layer, gradient.to(y.dtype))[0]


ROUTES: dict[str, Callable[[str, Tensor, Tensor], Tensor]] = {
    "product": product,
    "dX": product_as_dx,
    "dW": product_as_dw,
}


@dataclass(frozen=True)
class Case:
    """One row of the table: `x @ weight.T` of a distribution, x `[m, k]` and weight `[n, k]`, by one route."""

    route: str
    distribution: str
    m: int
    n: int
    k: int

    @property
    def title(self) -> str:
        """What `--filter` looks in."""
        return f"{self.route} {self.distribution} K={self.k}"

    @property
    def source(self) -> Distribution:
        """Where the matrices come from."""
        return BY_NAME[self.distribution]


def cases(small: bool, quick: bool, filters: list[str]) -> list[Case]:
    """The suite's cases whose title holds every one of `filters`, case ignored; small and quick ones are less deep."""
    depths = SMALL_DEPTHS if small or quick else DEPTHS
    m, n = SMALL_SIZES if small else SIZES

    def every() -> Iterator[Case]:
        for route in ROUTES:
            for k in depths if route == "product" else BACKWARD_DEPTHS:
                for distribution in DISTRIBUTIONS:
                    yield Case(route, distribution.name, m, n, k)

    return [case for case in every() if all(text.lower() in case.title.lower() for text in filters)]


def ratio(ours: float, theirs: float) -> float:
    """Of two errors: 1 where both are 0."""
    if theirs == 0:
        return math.inf if ours else 1.0
    return ours / theirs if math.isfinite(ours) else math.inf


def run_case(case: Case, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Every contender's errors, and the ratios of "guarded" to cuBLAS fp32, as JSON holds them."""
    x, weight = case.source.sample(case.m, case.n, case.k, device, seed)
    exact = Exact.of(x, weight)
    entries: dict[str, dict[str, Any]] = {}
    for name in CONTENDERS:
        try:
            entries[name] = asdict(measure(ROUTES[case.route](name, x, weight), exact))
        except Exception as error:  # One contender's failure must not lose the others'.
            entries[name] = {"note": f"failed: {one_line(error)}"}
    ours, theirs = entries[GUARDED], entries[CUBLAS]
    ratios = {key: ratio(ours.get(key, math.inf), theirs.get(key, math.inf)) for key in MEASURES}
    return {**asdict(case), "is_exact": case.source.is_exact, "contenders": entries, "ratios": ratios}


def geometric_mean(ratios: list[float]) -> float:
    """Of ratios, none counted below `LEAST_RATIO`."""
    return math.exp(sum(math.log(max(value, LEAST_RATIO)) for value in ratios) / len(ratios))


def verdict(what: str, value: float, at_most: float, where: str = "") -> dict[str, Any]:
    """A line of the contract and whether it is met."""
    return {"what": what, "value": value, "at_most": at_most, "where": where, "met": value <= at_most}


def judge(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The contract's verdicts for each route that has cases."""
    verdicts = []
    for route in ROUTES:
        own = [entry for entry in figures if entry["route"] == route]
        if not own:
            continue
        ratios = {
            f"{entry['distribution']}, K={entry['k']}, {key}": value
            for entry in own
            for key, value in entry["ratios"].items()
        }
        worst = max(ratios, key=lambda where: ratios[where])
        verdicts.append(verdict(f"{route}: geometric mean", geometric_mean(list(ratios.values())), MEAN_AT_MOST))
        verdicts.append(verdict(f"{route}: worst cell", ratios[worst], WORST_AT_MOST, worst))
        errors = {
            f"{entry['distribution']}, K={entry['k']}": entry["contenders"][GUARDED].get("largest", math.inf)
            for entry in own
            if entry["is_exact"]
        }
        if errors:
            worst = max(errors, key=lambda where: errors[where])
            verdicts.append(verdict(f"{route}: error of integers", errors[worst], 0.0, worst if errors[worst] else ""))
    return verdicts


def trade_off(device: torch.device, small: bool, effort: Effort, seed: int = 0) -> dict[str, Any]:
    """Each contender's time (as `bench.timing.Timing` in us) and relative Frobenius error on one normal product."""
    m, n, k = SMALL_TRADE_OFF_SHAPE if small else TRADE_OFF_SHAPE
    x, weight = BY_NAME["normal"].sample(m, n, k, device, seed)
    operands = {name: (x, weight) for name in TRADE_OFF_CONTENDERS}
    operands[BF16] = (x.bfloat16(), weight.bfloat16())
    exact = x.double() @ weight.double().t()
    entries: dict[str, dict[str, Any]] = {}
    for name in TRADE_OFF_CONTENDERS:
        try:
            entries[name] = {"error": frobenius_error(product(name, *operands[name]), exact)}
        except Exception as error:  # One contender's failure must not lose the others'.
            entries[name] = {"note": f"failed: {one_line(error)}"}
    del exact

    def launch(name: str) -> Callable[[], Tensor]:
        return lambda: product(name, *operands[name])

    launches = {name: launch(name) for name, entry in entries.items() if "error" in entry}
    for name, timing in interleave(launches, clock_for(device), effort, seed).items():
        entries[name].update(asdict(timing))
    return {"shape": f"{m}x{n}x{k}", "contenders": entries}


def run_suite(
    chosen: list[Case],
    device: torch.device,
    small: bool,
    effort: Effort,
    seed: int,
    progress: Progress,
    on_case: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run `chosen`, handing each one's figures to `on_case`; returns the figures of `trade_off`."""
    with PRECISIONS["fp32"].active():
        for case in chosen:
            progress.begin(case.title)
            before = time.perf_counter()
            try:
                figures = run_case(case, device, seed)
            except Exception as error:  # Out of memory, say: other cases may still fit.
                note = f"failed: {one_line(error)}"
                figures = {
                    **asdict(case),
                    "is_exact": case.source.is_exact,
                    "contenders": {},
                    "ratios": dict.fromkeys(MEASURES, math.inf),
                    "note": note,
                }
            figures["seconds"] = time.perf_counter() - before
            on_case(figures)
            progress.finish(progress_figures(figures))
    return run_trade_off(device, small, effort, seed, progress)


def run_trade_off(device: torch.device, small: bool, effort: Effort, seed: int, progress: Progress) -> dict[str, Any]:
    """The figures of `trade_off`, as the last step of a run."""
    progress.begin("error and time")
    before = time.perf_counter()
    gc.collect()
    with PRECISIONS["fp32"].active():
        found = trade_off(device, small, effort, seed)
    progress.finish({**found, "seconds": time.perf_counter() - before})
    return found


def progress_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """A case as `bench.progress` prints it: the relative Frobenius errors."""
    notes = {
        name: {"note": entry.get("note") or f"{entry['frobenius']:.1e}"}
        for name, entry in figures["contenders"].items()
    }
    return {**figures, "contenders": notes}
