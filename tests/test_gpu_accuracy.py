"""fp32 products on a GPU: the accuracy contract on a reduced grid, special values, and which plan the guard picks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from generators import assert_linear, make_inputs
from gpu_tensors import SLACK, captured
from torch import Tensor

import cutfuse
from bench import accuracy_suite as suite
from bench.accuracy_suite import BY_NAME, DISTRIBUTIONS
from bench.goals import MET, judged
from bench.suite import Figures, Session
from bench.timing import Effort
from cutfuse.layer.linear_plan import SPLITS_ON_ITS_WAY

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_at_highest")]

DEPTHS = (64, 1000, 8192)
# Large enough that "guarded" runs over planes from K = 1000 on, and small enough that it takes cuBLAS at K = 64.
ROWS, COLUMNS = 1024, 2048
CASES = [
    suite.Product(route, distribution.name, ROWS, COLUMNS, k)
    for route in suite.ROUTES
    for k in (DEPTHS if route == "product" else suite.BACKWARD_DEPTHS)
    for distribution in DISTRIBUTIONS
]


def sample(name: str, k: int = 1000, m: int = ROWS, n: int = COLUMNS) -> tuple[Tensor, Tensor]:
    return BY_NAME[name].sample(m, n, k, torch.device("cuda"))


@functools.cache
def measured(product: suite.Product) -> Figures:
    """The case's figures; each case is run once for all tests."""
    return {**product.case.as_dict(), **product.figures(Session(torch.device("cuda"), (), Effort()))}


@pytest.mark.parametrize("product", CASES, ids=lambda product: product.case.title)
def test_no_cell_is_far_above_cublas(product: suite.Product) -> None:
    figures = measured(product)
    failed = {name: entry for name, entry in figures["contenders"].items() if "note" in entry}
    assert not failed
    assert max(figures["ratios"].values()) <= suite.WORST_AT_MOST, figures
    if product.source.is_exact:
        assert all(figures["contenders"][name]["largest"] == 0 for name in ("guarded", "split3", "split6"))


def test_contract_over_all_cells() -> None:
    cases = [measured(product) for product in CASES]
    for goal in suite.SUITE.goals:
        expected = sum(map(goal.covers, cases))
        assert judged(goal, cases, expected, gives_verdict=True).verdict == MET, goal


@pytest.mark.parametrize("k", DEPTHS[1:])
@pytest.mark.parametrize(
    ("name", "plan", "other"),
    [
        ("normal", "split3", "split6"),
        ("log-normal, sigma 1", "split3", "split6"),
        ("columns 2^-20..2^20 smoothly", "split3", "split6"),
        ("columns 2^+-8 at random", "split6", "split3"),
        ("columns 2^+-20 at random", "split6", "split3"),
        ("a few huge rows", "split6", "split3"),
    ],
)
def test_guard_picks_the_plan(name: str, plan: str, other: str, k: int) -> None:
    x, weight = sample(name, k)
    found = suite.product("guarded", x, weight)
    assert torch.equal(found, suite.product(plan, x, weight))
    assert not torch.equal(found, suite.product(other, x, weight))


# Shapes, M, N and K, whose weights are split on their way into the product, and by a pass of their own.
SPLIT_ON_ITS_WAY, SPLIT_FIRST = (128, 4096, 4096), (ROWS, COLUMNS, 1000)


def splits_on_its_way(x: Tensor, weight: Tensor) -> bool:
    """Whether cutfuse says that it does so."""
    return SPLITS_ON_ITS_WAY in cutfuse.explain(cutfuse.linear, x, weight).steps


@pytest.mark.parametrize("shape", [SPLIT_ON_ITS_WAY, SPLIT_FIRST], ids=str)
@pytest.mark.parametrize("operand", ["x", "weight"])
def test_guard_watches_both_operands_and_one_element(operand: str, shape: tuple[int, int, int]) -> None:
    for value in (math.inf, math.nan, 2.0**70, 2.0**-140):
        m, n, k = shape
        x, weight = sample("normal", k=k, m=m, n=n)
        assert splits_on_its_way(x, weight) == (shape == SPLIT_ON_ITS_WAY)
        target = x if operand == "x" else weight
        target[16:32, 320:384] = 0.0  # the only nonzero element of the blocks with its scale
        target[17, 333] = value
        found = suite.product("guarded", x, weight)
        torch.testing.assert_close(found, suite.product("split6", x, weight), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [SPLIT_ON_ITS_WAY, SPLIT_FIRST], ids=str)
@pytest.mark.parametrize(("rows", "plan"), [(slice(37, 38), "split6"), (slice(32, 48), "split3")], ids=["one", "all"])
def test_guard_watches_rows_of_a_weight_that_share_scales(rows: slice, plan: str, shape: tuple[int, int, int]) -> None:
    """Far below its neighbours a row trips; with all that share its scale it does not, and is as accurate."""
    m, n, k = shape
    x, weight = sample("normal", k=k, m=m, n=n)
    weight[rows] *= 2.0**-16
    found = suite.product("guarded", x, weight)
    assert torch.equal(found, suite.product(plan, x, weight))
    exact = suite.Exact.of(x, weight[rows])
    cublas = suite.measure(suite.product(suite.CUBLAS, x, weight)[:, rows], exact)
    assert suite.measure(found[:, rows], exact).frobenius < cublas.frobenius


def insert(values: dict[tuple[int, int], float]) -> Callable[[Tensor], None]:
    """Write values at (row, column)."""

    def write(tensor: Tensor) -> None:
        for place, value in values.items():
            tensor[place] = value

    return write


def zero_column(column: int) -> Callable[[Tensor], None]:
    return lambda tensor: tensor[:, column].zero_()


def one_signed(column: int, value: float) -> Callable[[Tensor], None]:
    """A column of ones: 1 has no low part, and no part of an infinity may meet the 0 that stands there."""
    return lambda tensor: tensor[:, column].fill_(value)


def big_row(row: int, value: float) -> Callable[[Tensor], None]:
    return lambda tensor: tensor[row].fill_(value)


INF, NAN = math.inf, math.nan
# What is written into x and into weight, both normal otherwise.
SPECIAL: dict[str, tuple[list[Callable[[Tensor], None]], list[Callable[[Tensor], None]]]] = {
    "inf in x": ([insert({(3, 5): INF})], []),
    "-inf in x": ([insert({(3, 5): -INF})], []),
    "nan in x": ([insert({(3, 5): NAN})], []),
    "inf in weight": ([], [insert({(7, 999): INF})]),
    "-inf in weight": ([], [insert({(7, 999): -INF})]),
    "nan in weight": ([], [insert({(7, 999): NAN})]),
    "inf of both signs in a row": ([insert({(0, 1): INF, (0, 900): -INF, (200, 64): INF, (200, 65): INF})], []),
    "inf in x and in weight": ([insert({(1, 70): INF})], [insert({(2, 70): -INF, (5, 71): INF})]),
    "inf and nan": ([insert({(1, 70): INF, (9, 0): NAN})], [insert({(2, 70): -INF, (511, 127): NAN})]),
    "inf * 0": ([insert({(4, 130): INF, (5, 130): -INF})], [zero_column(130)]),
    "0 * inf": ([zero_column(130)], [insert({(4, 130): INF})]),
    "inf * 1": ([insert({(4, 130): INF, (5, 131): -INF})], [one_signed(130, 1.0), one_signed(131, -1.0)]),
    "1 * inf": ([one_signed(130, 1.0), one_signed(131, -1.0)], [insert({(4, 130): INF, (5, 131): -INF})]),
    "inf alone in its block": (
        [lambda t: t[6, 128:192].zero_(), insert({(6, 150): INF})],
        [one_signed(150, 0.5)],
    ),
    "inf * denormal": ([insert({(4, 130): INF})], [one_signed(130, 2.0**-149)]),
    "sums that overflow": ([big_row(3, 1e30), big_row(4, -1e30)], [big_row(8, 1e30)]),
    "largest finite": ([insert({(3, 5): 3.4028234e38})], []),
}


@pytest.mark.parametrize("k", [1000, 1024])
@pytest.mark.parametrize("mode", ["guarded", "split6"])
@pytest.mark.parametrize("route", suite.ROUTES)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_come_out_where_cublas_has_them(name: str, route: str, mode: str, k: int) -> None:
    x, weight = sample("normal", k)
    for tensor, writes in zip((x, weight), SPECIAL[name], strict=True):
        for write in writes:
            write(tensor)
    expected = suite.ROUTES[route](suite.CUBLAS, x, weight)
    actual = suite.ROUTES[route](mode, x, weight)
    special = ~expected.isfinite()
    assert special.any() or name == "largest finite"
    assert torch.equal(~actual.isfinite(), special)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf() & (actual > 0), expected.isinf() & (expected > 0))
    exact = suite.Exact.of(x, weight)  # finite wherever the fp32 product is
    difference = (actual.double() - exact.product).abs()
    assert (difference <= 1e-5 * exact.magnitude)[~special].all()


# Rows, columns, depth: whole tiles; parts of tiles and of blocks, and a last slice that is shorter; many slices of one
# tile; a weight that the copy engine does not take.
SHAPES = ((128, 1024, 8192), (257, 520, 4100), (16, 64, 32768), (100, 384, 5001))
MODES = ("guarded", "split3", "split6")


def sliced(x: Tensor, weight: Tensor, bias: Tensor | None = None, reduce: str | None = None) -> Tensor:
    """What three calls agree on; at least the first product is sliced where its mode is forced."""
    results = [cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid, reduce=reduce) for _ in range(3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    return results[0]


@pytest.mark.parametrize("reduce", [None, "sum", "logsumexp"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slices_add_up(shape: tuple[int, int, int], mode: str, reduce: str | None) -> None:
    x, weight, bias = make_inputs(*shape, torch.float32, "cuda")
    with cutfuse.precision(mode):
        explanation = cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid, reduce=reduce)
        assert mode == "guarded" or "slices of K" in explanation.steps[0]
        actual = sliced(x, weight, bias, reduce)
    assert_linear(actual, x, weight, bias, torch.sigmoid, (), reduce, SLACK)


@pytest.mark.parametrize("mode", ["guarded", "split6"])
@pytest.mark.parametrize("k", [3, 4000, 8191])
def test_what_is_not_finite_comes_out_of_any_slice(k: int, mode: str) -> None:
    x, weight, _ = make_inputs(130, 260, 8192, torch.float32, "cuda")
    inf, nan = float("inf"), float("nan")
    x[5, k], x[7, 8191 - k], weight[9, k], weight[200, 0] = inf, -inf, nan, inf
    with cutfuse.precision(mode):
        actual = cutfuse.linear(x, weight)
    expected = torch.nn.functional.linear(x, weight)
    for same in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(same(actual), same(expected))


def test_a_graph_replays_slices() -> None:
    x, weight, bias = make_inputs(128, 1024, 8192, torch.float32, "cuda")
    with cutfuse.precision("guarded"):
        expected = sliced(x, weight, bias)
        graph, y = captured(lambda: cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid))
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
