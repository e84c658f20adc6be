"""The accuracy of fp32 products against fp64, held to what PyTorch's own fp32 has: the contract of "guarded".

Every distribution, at several depths, as a product and as the two products of a backward pass; and, at one size, what
each precision costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

import cutfuse
from bench.distributions import BY_NAME, DISTRIBUTIONS, Distribution
from bench.goals import MEAN, WORST, cases_with
from bench.launches import Checked, interleaved
from bench.suite import Case, Figures, Goal, Results, Session, Suite, Turn
from bench.tables import MISSING, Table, Text, case_table, error, figure, microseconds, of, ratio
from bench.timing import Launch
from bench.workloads import PRECISIONS, dimensions, frobenius_error

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

    def check(self, name: str, x: Tensor, weight: Tensor, exact: Exact, entry: Figures) -> None:
        """A contender's errors."""
        entry.update(asdict(measure(ROUTES[self.route](name, x, weight), exact)))

    def figures(self, session: Session) -> Figures:
        """Every contender's errors, and the ratios of "guarded" to cuBLAS fp32. Nothing is timed."""
        x, weight = self.source.sample(self.m, self.n, self.k, session.device, session.seed)
        exact = Exact.of(x, weight)
        checked: Checked[None] = Checked(session)
        for name in CONTENDERS:
            checked.add(name, partial(self.check, name, x, weight, exact))
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


def error_of_integers(case: Figures) -> float:
    """The largest error of "guarded" where every sum is exact."""
    return finite(case["contenders"].get(GUARDED, {}).get("largest"))


def goals_of(route: str) -> tuple[Goal, ...]:
    """The contract on one route."""
    covers = cases_with(group=route)
    is_exact = cases_with(lambda case: BY_NAME[case["variant"]].is_exact, group=route)
    return (
        Goal(f"{route}: errors", f"{CUBLAS}'s", covers, mean_ratio, MEAN_AT_MOST, MEAN),
        Goal(f"{route}: errors", f"{CUBLAS}'s", covers, lambda case: max(ratios_of(case)), WORST_AT_MOST, WORST),
        Goal(f"{route}: error of integers", "", is_exact, error_of_integers, 0.0, WORST),
    )


GOALS = tuple(goal for route in ROUTES for goal in goals_of(route))


def trade_off(m: int, n: int, k: int, session: Session) -> Turn:
    """Each contender's relative Frobenius error on one normal product, and what takes their times."""
    x, weight = BY_NAME["normal"].sample(m, n, k, session.device, session.seed)
    operands = {name: (x, weight) for name in TRADE_OFF_CONTENDERS}
    operands[BF16] = (x.bfloat16(), weight.bfloat16())
    exact = x.double() @ weight.double().t()
    checked: Checked[Launch] = Checked(session)

    def check(name: str, entry: Figures) -> Launch:
        launch = partial(product, name, *operands[name])
        entry["error"] = frobenius_error(launch(), exact)
        return launch

    for name in TRADE_OFF_CONTENDERS:
        checked.add(name, partial(check, name))
    return partial(interleaved, checked)


def trade_off_case(small: bool) -> Case:
    """The error of one product against its time, for every precision."""
    shape = SMALL_TRADE_OFF_SHAPE if small else TRADE_OFF_SHAPE
    return Case(TRADE_OFF, "", dimensions(shape), "fp32", partial(trade_off, *shape))


def trade_off_table(results: Results) -> list[Table]:
    """Each contender's time and error on one product."""
    tables = []
    for case in (case for case in results["cases"] if case["group"] == TRADE_OFF):
        found = case["contenders"]
        base = found.get(CUBLAS, {}).get("median_us")
        columns = {
            "contender": list(found),
            "error": [figure(entry, "error", error) for entry in found.values()],
            "times as fast": [
                ratio(base / entry["median_us"]) if base and "median_us" in entry else MISSING
                for entry in found.values()
            ],
            "us": [figure(entry, "median_us", microseconds) for entry in found.values()],
        }
        title = f"Error and time of a product of {case['shape']}, normal inputs, weights split on each call"
        tables.append(Table(title, columns))
    return tables


def depth_of(case: Figures) -> int:
    """K of a case."""
    return int(case["shape"].split("x")[2])


def largest_ratio(case: Figures) -> str:
    """The largest of a case's ratios."""
    return f"{max(ratios_of(case)):.2f}"


ERRORS: dict[str, Text] = {name: of(name, "frobenius", lambda value: error(finite(value))) for name in CONTENDERS}
DEPTH: dict[str, Text] = {"K": lambda case: str(depth_of(case))}


def cases_table(results: Results) -> Table:
    """Every case."""
    columns: dict[str, str | Text] = {
        "inputs": "variant",
        "route": "group",
        "largest ratio": largest_ratio,
        **DEPTH,
        **ERRORS,
    }
    return case_table("Relative Frobenius errors", results["cases"], columns)


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
    cases=lambda *kind: list(accuracy_cases(*kind)),
    goals=GOALS,
    contenders=CONTENDERS,
    tables=lambda results: [cases_table(results)],
    about=[
        "Errors against fp64: relative Frobenius norm, and max and mean of |d| / (|x| |weight|.T). Ratios are of "
        f"{GUARDED} to {CUBLAS}, over all three. dX and dW are the product as the gradient of a layer's input and of "
        "its weight."
    ],
    time_limit_s=1200.0,
    compiles=False,
    is_contract=True,
)
