"""The accuracy suite on the CPU: its inputs are what they say, and its metric can fail."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import CPU, results_of, run, session_of
from torch import Tensor

import cutfuse
from bench import accuracy_suite as suite
from bench.accuracy_suite import BY_NAME, DISTRIBUTIONS, HUGE_ROWS
from bench.goals import MISSED, lines_of
from bench.suite import Case
from cutfuse.precision import product_mode

NAMES = [distribution.name for distribution in DISTRIBUTIONS]


def sample(name: str, m: int = 48, n: int = 40, k: int = 1000) -> tuple[Tensor, Tensor]:
    return BY_NAME[name].sample(m, n, k, CPU)


def octave(tensor: Tensor) -> Tensor:
    """log2 of the absolute values."""
    return tensor.double().abs().log2()


@pytest.mark.parametrize("k", [1, 64, 65, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_distributions_are_finite_fp32_of_the_shape_and_repeat(name: str, k: int) -> None:
    x, weight = sample(name, 5, 7, k)
    assert (x.shape, weight.shape) == ((5, k), (7, k))
    assert x.dtype == weight.dtype == torch.float32
    assert x.isfinite().all()
    assert weight.isfinite().all()
    assert (x.double() @ weight.double().t()).abs().max() < torch.finfo(torch.float32).max
    again = sample(name, 5, 7, k)
    assert torch.equal(x, again[0])
    assert torch.equal(weight, again[1])
    other = BY_NAME[name].sample(5, 7, k, CPU, seed=1)
    assert k == 1 or not torch.equal(x, other[0])


@pytest.mark.parametrize("k", [64, 1000, 8192, 32768])
def test_integers_are_exact_in_any_order(k: int) -> None:
    x, weight = sample("integers below 2^11", 16, 16, k)
    assert torch.equal(x, x.round())
    assert torch.equal(weight, weight.round())
    assert weight.abs().max() >= 1
    assert 2**8 < x.abs().max() < 2**11
    bound = x.abs().max().double() * weight.abs().max().double() * k
    assert 2**22 < bound < 2**24


@pytest.mark.parametrize("k", [64, 1000, 1001, 8192])
def test_sums_cancel_to_a_ten_thousandth(k: int) -> None:
    exact = suite.Exact.of(*sample("sums that cancel", 48, 40, k))
    assert 3e-5 < (exact.product.abs() / exact.magnitude).mean() < 3e-4


def test_columns_rows_and_outliers_have_the_range_they_are_named_for() -> None:
    for name, reach in (("columns 2^+-8 at random", 8), ("columns 2^+-20 at random", 20)):
        x, weight = sample(name)
        of_x, of_weight = octave(x).mean(0), octave(weight).mean(0)
        assert of_x.max() - of_x.min() > 2 * reach - 2
        assert (of_x + of_weight).abs().max() < 4  # weight's columns are scaled inversely
        assert (of_x.diff() < 0).float().mean() > 0.3  # in no order
    smooth = octave(sample("columns 2^-20..2^20 smoothly")[0]).mean(0)
    assert smooth[-1] - smooth[0] > 36
    assert (smooth[100:] > smooth[:-100]).all()
    rows = octave(sample("rows 2^-40..2^40")[0]).mean(1)
    assert rows[-1] - rows[0] == pytest.approx(80, abs=1)
    huge = sample("a few huge rows", m=2 * HUGE_ROWS)[0].abs().amax(1) > 2.0**80
    assert huge.nonzero().flatten().tolist() == [0, HUGE_ROWS]
    share = (sample("2% outliers x 1e4")[0].abs() > 100).float().mean()
    assert share == pytest.approx(0.02, abs=0.003)


def test_denormals_and_tiny_values_are_kept() -> None:
    x, weight = sample("denormal x normal")
    assert x.abs().max() < torch.finfo(torch.float32).tiny
    assert (x != 0).float().mean() > 0.99
    assert weight.abs().max() > 1
    x, weight = sample("tiny x tiny")
    products = suite.Exact.of(x, weight).product.abs()
    assert 0 < products.max() < torch.finfo(torch.float32).tiny


def test_signs_are_as_named() -> None:
    x, weight = sample("uniform positive x positive")
    assert min(x.min(), weight.min()) >= 0
    x, weight = sample("uniform positive x centred")
    assert x.min() >= 0
    assert abs(weight.mean()) < 0.02
    for sigma in (1, 4):
        x, _ = sample(f"log-normal, sigma {sigma}")
        assert (x > 0).float().mean() == pytest.approx(0.5, abs=0.02)
        assert x.double().abs().log().std() == pytest.approx(sigma, rel=0.02)


def test_measure_gives_each_error_by_its_definition() -> None:
    exact = suite.Exact(torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[6.0, 8.0]]).double())
    found = suite.measure(torch.tensor([[3.0, 5.0]]), exact)
    assert found == suite.Errors(frobenius=1 / 5, largest=1 / 8, mean=1 / 16)
    assert suite.measure(exact.product.float(), exact) == suite.Errors(0.0, 0.0, 0.0)


def test_magnitude_is_the_product_of_absolute_values() -> None:
    exact = suite.Exact.of(torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 4.0], [-1.0, 0.0]]))
    assert exact.product.tolist() == [[-5.0, -1.0]]
    assert exact.magnitude.tolist() == [[11.0, 1.0]]


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_measure_never_passes_a_result_that_is_not_finite(special: float) -> None:
    exact = suite.Exact.of(torch.ones(2, 3), torch.ones(4, 3))
    result = exact.product.float()
    result[1, 2] = special
    assert suite.measure(result, exact) == suite.Errors(math.inf, math.inf, math.inf)


def test_measure_where_there_is_nothing_to_be_relative_to_or_another_shape() -> None:
    exact = suite.Exact.of(torch.zeros(1, 3), torch.ones(2, 3))
    assert suite.measure(torch.zeros(1, 2), exact) == suite.Errors(0.0, 0.0, 0.0)
    found = suite.measure(torch.tensor([[0.0, 1e-30]]), exact)
    assert (found.frobenius, found.largest) == (math.inf, math.inf)
    with pytest.raises(ValueError, match=r"shape \(2, 1\), but its rows 0:1 should be of shape \(1, 2\)"):
        suite.measure(torch.zeros(2, 1), exact)


def test_ratio_of_errors() -> None:
    assert suite.error_ratio(0.0, 0.0) == 1
    assert suite.error_ratio(1e-9, 0.0) == math.inf
    assert suite.error_ratio(0.0, 1e-9) == 0
    assert suite.error_ratio(2e-9, 1e-9) == 2
    assert suite.error_ratio(math.inf, math.inf) == math.inf  # neither gave a result: no reason to pass


@pytest.mark.parametrize("name", suite.CONTENDERS)
@pytest.mark.parametrize("route", suite.ROUTES)
def test_every_route_and_contender_gives_the_product(route: str, name: str) -> None:
    x, weight = sample("normal", 6, 7, 33)
    result = suite.ROUTES[route](name, x, weight)
    tolerance = 2e-2 if name == suite.BF16 else 1e-6
    assert suite.measure(result, suite.Exact.of(x, weight)).frobenius < tolerance


def test_contenders_run_in_the_modes_they_are_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, torch.dtype]] = []

    def record(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((product_mode(), x.dtype))
        return x @ weight.t()

    monkeypatch.setattr(cutfuse, "linear", record)
    x, weight = sample("normal", 2, 3, 4)
    with cutfuse.precision("ieee"):  # "guarded" follows PyTorch whatever is forced around it
        for name in suite.CONTENDERS:
            suite.product(name, x, weight)
    forced = [("guarded", torch.float32), ("split3", torch.float32), ("split6", torch.float32), ("tf32", torch.float32)]
    assert seen == [*forced, ("ieee", torch.bfloat16)]


@pytest.mark.parametrize("small", [False, True])
def test_cases_cover_every_distribution_depth_and_route(small: bool) -> None:
    found = [case.as_dict() for case in suite.accuracy_cases(small, False, 0)]
    depths = {suite.depth_of(case) for case in found if case["group"] == "product"}
    assert depths == ({64, 1000} if small else {64, 1000, 8192, 32768})
    for route in suite.ROUTES:
        assert {case["variant"] for case in found if case["group"] == route} == set(NAMES)


def test_a_cpu_has_one_product_of_fp32_which_integers_leave_exact() -> None:
    for name in ("normal", "integers below 2^11"):
        found = suite.Product("product", name, 48, 80, 64).figures(session_of())
        assert found["ratios"] == dict.fromkeys(suite.MEASURES, 1.0)
        ours = found["contenders"][suite.GUARDED]
        assert BY_NAME[name].is_exact == (ours["largest"] == 0)
        assert 0 <= ours["mean"] <= ours["largest"] < 1e-3


def test_a_distribution_has_the_errors_of_its_deepest_product_and_the_largest_ratio_of_all() -> None:
    def case(route: str, k: int, error: float, largest: float | None) -> dict[str, Any]:
        own = {"group": route, "variant": "normal", "shape": f"8x8x{k}", "precision": "fp32"}
        ratios = dict(zip(suite.MEASURES, (0.5, largest, 0.5), strict=True))
        return {**own, "ratios": ratios, "contenders": {suite.GUARDED: {"frobenius": error}}}

    cases = [case("product", 8192, 2e-7, 0.5), case("product", 64, 1e-7, 0.75), case("dW", 1000, 3e-7, 0.6)]
    columns = suite.distributions_table(results_of("accuracy", cases)).columns
    found = {name: columns[name] for name in ("inputs", "K", "guarded", "largest ratio")}
    assert found == {
        "inputs": ["normal"],
        "K": ["8192"],
        "guarded": ["2.0e-07"],
        "largest ratio": ["0.75"],
    }
    cases.append(case("dX", 1000, 3e-7, None))  # JSON's infinity
    assert suite.distributions_table(results_of("accuracy", cases)).columns["largest ratio"] == ["inf"]


def test_a_worse_product_misses_the_contract_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.goals.judges", lambda *_: True)
    monkeypatch.setattr("bench.goals.suite_of", lambda name: replace(suite.SUITE, cases=small_cases))
    linear = cutfuse.linear
    monkeypatch.setattr(cutfuse, "linear", lambda x, weight: linear(x, weight) * (1 + 2.0**-20))
    status, found = run("accuracy", tmp_path / "run", "--filter", "product")
    assert status == 1
    assert [line.verdict for line in lines_of(found)][:3] == [MISSED] * 3


def small_cases(*kind: object) -> list[Case]:
    """Those of a CPU, as if they were the whole suite."""
    return list(suite.accuracy_cases(True, False, 0))
