"""The accuracy of fp32 products against fp64, held to what PyTorch's own fp32 has: the contract of "guarded".

Every distribution, at several depths, as a product and as the two products of a backward pass; and, at one size, what
each precision costs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

import cutfuse
from bench.goals import MEAN, WORST, cases_with
from bench.launches import check_all, interleaved
from bench.suite import Case, Figures, Goal, Results, Session, Suite, Turn
from bench.tables import MISSING, Table, Text, case_table, error, figure, microseconds, of, ratio, table_of
from bench.timing import Launch
from bench.workloads import PRECISIONS, dimensions, relative_error

LARGEST_INTEGER = 2**11 - 1
LARGEST_SUM = 2**24 - 1  # fp32 holds every integer up to this one
HUGE_ROWS = 64  # one row in so many is huge
CANCELLED_TO = 1e-4  # of the sum of the terms' absolute values


@dataclass(frozen=True)
class Draw:
    """Random fp64 numbers of one stream on one device."""

    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """Of mean 0 and variance 1."""
        return torch.randn(shape, dtype=torch.float64, device=self.generator.device, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1)."""
        return torch.rand(shape, dtype=torch.float64, device=self.generator.device, generator=self.generator)

    def integers(self, largest: int, *shape: int) -> Tensor:
        """From -largest to largest."""
        return (self.uniform(*shape) * (2 * largest + 1)).floor() - largest


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Distribution:
    """Pairs of matrices, by what makes rounding or splitting easy or hard in `x @ weight.T`.

    `make(draw, m, n, k)` gives x and weight in fp64, still to be rounded to fp32.

    `is_exact`: every product and partial sum is a multiple of one number and fits fp32, so a result has no error.
    """

    name: str
    make: Callable[[Draw, int, int, int], Pair]
    is_exact: bool = False

    def sample(self, m: int, n: int, k: int, device: torch.device, seed: int = 0) -> Pair:
        """x `[m, k]` and weight `[n, k]` in fp32; no two distributions draw the same numbers."""
        generator = torch.Generator(device).manual_seed(seed + zlib.crc32(self.name.encode()))
        x, weight = self.make(Draw(generator), m, n, k)
        return x.float(), weight.float()


def powers_of_two(exponents: Tensor) -> Tensor:
    """2 to the whole-numbered exponents, exactly."""
    return torch.ldexp(torch.ones_like(exponents), exponents.int())


def octaves(reach: int, count: int, device: torch.device) -> Tensor:
    """2^-reach to 2^reach in `count` even steps, rounded to powers of two."""
    return powers_of_two(torch.linspace(-reach, reach, count, dtype=torch.float64, device=device).round())


def log_normal(sigma: float) -> Callable[[Draw, int, int, int], Pair]:
    """exp(sigma * normal) with random signs."""

    def one(draw: Draw, rows: int, k: int) -> Tensor:
        return (sigma * draw.normal(rows, k)).exp().copysign(draw.uniform(rows, k) - 0.5)

    return lambda draw, m, n, k: (one(draw, m, k), one(draw, n, k))


def scaled_columns(scales: Callable[[Draw, int], Tensor]) -> Callable[[Draw, int, int, int], Pair]:
    """Normal values; column k of x times a scale `[K]`, column k of weight divided by it."""

    def make(draw: Draw, m: int, n: int, k: int) -> Pair:
        scale = scales(draw, k)
        return draw.normal(m, k) * scale, draw.normal(n, k) / scale

    return make


def random_scales(reach: int) -> Callable[[Draw, int], Tensor]:
    """Powers of two between 2^-reach and 2^reach, each as likely."""
    return lambda draw, k: powers_of_two(draw.integers(reach, k))


def outliers(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Normal values, 2% of x times 1e4."""
    return draw.normal(m, k) * torch.where(draw.uniform(m, k) < 0.02, 1e4, 1.0), draw.normal(n, k)


def huge_rows(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Normal values, every `HUGE_ROWS`th row of x times 2^90."""
    scale = torch.ones(m, 1, dtype=torch.float64, device=draw.generator.device)
    scale[::HUGE_ROWS] = 2.0**90
    return draw.normal(m, k) * scale, draw.normal(n, k)


def cancelling(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Normal values whose sums are about `CANCELLED_TO` of the sums of their absolute values.

    For each column of x there is one that is nearly the same and meets the opposite column of weight, somewhere along
    K. What is left of a pair is `apart` of a product, and of a whole sum `apart` * sqrt(K / 2), while the absolute
    values' sum is K * 2 / pi.
    """
    half = k // 2
    apart = CANCELLED_TO * 2 / math.pi * math.sqrt(2 * k)
    x, weight = draw.normal(m, half), draw.normal(n, half)
    twin = x + apart * draw.normal(m, half)
    odd = k - 2 * half
    order = draw.uniform(k).argsort()
    return (
        torch.cat([x, twin, apart * draw.normal(m, odd)], dim=1)[:, order],
        torch.cat([weight, -weight, draw.normal(n, odd)], dim=1)[:, order],
    )


def integers(draw: Draw, m: int, n: int, k: int) -> Pair:
    """Integers below 2^11, weight's small enough that no sum of absolute values reaches 2^24."""
    of_weight = max(1, LARGEST_SUM // (k * LARGEST_INTEGER))
    of_x = min(LARGEST_INTEGER, LARGEST_SUM // (k * of_weight))
    return draw.integers(of_x, m, k), draw.integers(of_weight, n, k)


DISTRIBUTIONS = (
    Distribution("normal", lambda draw, m, n, k: (draw.normal(m, k), draw.normal(n, k))),
    Distribution("uniform positive x positive", lambda draw, m, n, k: (draw.uniform(m, k), draw.uniform(n, k))),
    Distribution("uniform positive x centred", lambda draw, m, n, k: (draw.uniform(m, k), draw.uniform(n, k) - 0.5)),
    Distribution("log-normal, sigma 1", log_normal(1.0)),
    Distribution("log-normal, sigma 4", log_normal(4.0)),
    Distribution("columns 2^-20..2^20 smoothly", scaled_columns(lambda draw, k: octaves(20, k, draw.generator.device))),
    Distribution("columns 2^+-8 at random", scaled_columns(random_scales(8))),
    Distribution("columns 2^+-20 at random", scaled_columns(random_scales(20))),
    Distribution("2% outliers x 1e4", outliers),
    Distribution(
        "rows 2^-40..2^40",
        lambda draw, m, n, k: (draw.normal(m, k) * octaves(40, m, draw.generator.device)[:, None], draw.normal(n, k)),
    ),
    Distribution("a few huge rows", huge_rows),
    Distribution("sums that cancel", cancelling),
    Distribution("integers below 2^11", integers, is_exact=True),
    Distribution(
        "denormal x normal",  # of multiples of 2^-149 below 2^-126
        lambda draw, m, n, k: (draw.integers(2**23 - 1, m, k) * 2.0**-149, draw.normal(n, k)),
    ),
    Distribution("tiny x tiny", lambda draw, m, n, k: (draw.normal(m, k) * 2.0**-70, draw.normal(n, k) * 2.0**-70)),
)

BY_NAME = {distribution.name: distribution for distribution in DISTRIBUTIONS}


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
TRADE_OFF = "error and time"
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


def measure(result: Tensor, exact: Exact) -> Errors:
    """The errors of `result` `[M, N]`; raises ValueError where it has another shape."""
    frobenius = relative_error(result, exact.product)  # which raises the error
    if not result.isfinite().all():
        return Errors(math.inf, math.inf, math.inf)
    difference = (result.double() - exact.product).abs()
    relative = difference / exact.magnitude
    relative[difference == 0] = 0.0  # where the magnitude is 0 too
    return Errors(frobenius, relative.max().item(), relative.mean().item())


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
class Product:
    """`x @ weight.T` of a distribution, x `[m, k]` and weight `[n, k]`, by one route."""

    route: str
    distribution: str
    m: int
    n: int
    k: int

    @property
    def source(self) -> Distribution:
        """Where the matrices come from."""
        return BY_NAME[self.distribution]

    def figures(self, session: Session) -> Figures:
        """Every contender's errors, and the ratios of "guarded" to cuBLAS fp32. Nothing is timed."""
        x, weight = self.source.sample(self.m, self.n, self.k, session.device, session.seed)
        exact = Exact.of(x, weight)

        def check(name: str, entry: Figures) -> None:
            entry.update(asdict(measure(ROUTES[self.route](name, x, weight), exact)))

        checked = check_all(session, CONTENDERS, check)
        ours, theirs = checked.entries[GUARDED], checked.entries[CUBLAS]
        ratios = {key: error_ratio(ours.get(key, math.inf), theirs.get(key, math.inf)) for key in MEASURES}
        return {**checked.figures({}), "ratios": ratios}

    @property
    def case(self) -> Case:
        """The suite's case."""
        shape = dimensions((self.m, self.n, self.k))
        return Case(self.route, self.distribution, shape, "fp32", self.figures, seconds=1.0, needs_grad=True)


def accuracy_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """Every distribution at every depth by every route; small and quick ones are less deep."""
    del seed
    depths = SMALL_DEPTHS if small or quick else DEPTHS
    for route in ROUTES:
        for k in depths if route == "product" else BACKWARD_DEPTHS:
            for distribution in DISTRIBUTIONS:
                yield Product(route, distribution.name, *(SMALL_SIZES if small else SIZES), k).case


def error_ratio(ours: float, theirs: float) -> float:
    """Of two errors: 1 where both are 0."""
    if theirs == 0:
        return math.inf if ours else 1.0
    return ours / theirs if math.isfinite(ours) else math.inf


def finite(value: float | None) -> float:
    """A figure; JSON has null for infinity."""
    return math.inf if value is None else value


def ratios_of(case: Figures) -> list[float]:
    """The ratios of "guarded" to cuBLAS fp32, in the order of `MEASURES`; infinite where the case failed."""
    return [finite(case.get("ratios", {}).get(key)) for key in MEASURES]


def mean_ratio(case: Figures) -> float:
    """The geometric mean of a case's ratios, none counted below `LEAST_RATIO`."""
    return math.prod(max(value, LEAST_RATIO) for value in ratios_of(case)) ** (1 / len(MEASURES))


def goals_of(route: str) -> tuple[Goal, ...]:
    """The contract on one route."""
    covers = cases_with(group=route)
    is_exact = cases_with(lambda case: BY_NAME[case["variant"]].is_exact, group=route)

    def error_of_integers(case: Figures) -> float:
        return finite(case["contenders"].get(GUARDED, {}).get("largest"))

    return (
        Goal(f"{route}: errors", f"{CUBLAS}'s", covers, mean_ratio, MEAN_AT_MOST, MEAN),
        Goal(f"{route}: errors", f"{CUBLAS}'s", covers, lambda case: max(ratios_of(case)), WORST_AT_MOST, WORST),
        Goal(f"{route}: error of integers", "", is_exact, error_of_integers, 0.0, WORST),
    )


def trade_off(m: int, n: int, k: int, session: Session) -> Turn:
    """Each contender's relative Frobenius error on one normal product, and what takes their times."""
    x, weight = BY_NAME["normal"].sample(m, n, k, session.device, session.seed)
    operands = {name: (x, weight) for name in TRADE_OFF_CONTENDERS}
    operands[BF16] = (x.bfloat16(), weight.bfloat16())
    exact = x.double() @ weight.double().t()

    def check(name: str, entry: Figures) -> Launch:
        launch = partial(product, name, *operands[name])
        entry["error"] = relative_error(launch(), exact)
        return launch

    return partial(interleaved, check_all(session, TRADE_OFF_CONTENDERS, check))


def trade_off_case(small: bool) -> Case:
    """The error of one product against its time, for every precision."""
    shape = SMALL_TRADE_OFF_SHAPE if small else TRADE_OFF_SHAPE
    return Case(TRADE_OFF, "", dimensions(shape), "fp32", partial(trade_off, *shape))


def trade_off_table(results: Results) -> Table:
    """Each contender's time and error on one product."""
    case = next((case for case in results["cases"] if case["group"] == TRADE_OFF), {"shape": "", "contenders": {}})
    found = case["contenders"]
    base = found.get(CUBLAS, {}).get("median_us")
    columns = {
        "contender": list(found),
        "error": [figure(entry, "error", error) for entry in found.values()],
        "times as fast": [
            ratio(base / entry["median_us"]) if base and "median_us" in entry else MISSING for entry in found.values()
        ],
        "us": [figure(entry, "median_us", microseconds) for entry in found.values()],
    }
    return Table(f"Error and time of a product of {case['shape']}, normal inputs, weights split on each call", columns)


def depth_of(case: Figures) -> int:
    """K of a case."""
    return int(case["shape"].split("x")[2])


def largest_ratio(case: Figures) -> str:
    """The largest of a case's ratios."""
    return f"{max(ratios_of(case)):.2f}"


ERRORS: dict[str, Text] = {name: of(name, "frobenius", lambda value: error(finite(value))) for name in CONTENDERS}
DEPTH: dict[str, Text] = {"K": lambda case: str(depth_of(case))}


def distributions_table(results: Results) -> Table:
    """Of each distribution: the errors of its deepest product, and the largest ratio of all its cases."""
    products = sorted((case for case in results["cases"] if case["group"] == "product"), key=depth_of)
    deepest = {case["variant"]: case for case in products}

    def largest_of_all(product: Figures) -> str:
        own = [case for case in results["cases"] if case["variant"] == product["variant"]]
        return largest_ratio(max(own, key=lambda case: max(ratios_of(case))))

    columns: dict[str, str | Text] = {"inputs": "variant", **DEPTH, "largest ratio": largest_of_all, **ERRORS}
    return case_table("Deepest products", list(deepest.values()), columns)


SUITE = Suite(
    name="accuracy",
    cases=accuracy_cases,
    goals=tuple(goal for route in ROUTES for goal in goals_of(route)),
    contenders=CONTENDERS,
    tables=(table_of("Relative Frobenius errors", {"largest ratio": largest_ratio, **DEPTH, **ERRORS}),),
    about=[
        "Errors against fp64: relative Frobenius norm, and max and mean of |d| / (|x| |weight|.T). Ratios are of "
        f"{GUARDED} to {CUBLAS}, over all three. dX and dW are the product as the gradient of a layer's input and of "
        "its weight."
    ],
    time_limit_s=1200.0,
    compiles=False,
    is_contract=True,
)
