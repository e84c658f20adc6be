"""The accuracy suite on the CPU: its inputs are what they say, and its metric can fail."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_runs import CPU, parts_of, run
from torch import Tensor

import cutfuse
from bench import accuracy_suite as suite
from bench import fp32_cases as fp32
from bench.accuracy import WRONG_ABOVE, relative_error
from bench.distributions import BY_NAME, DISTRIBUTIONS, HUGE_ROWS
from bench.goals import MISSED, lines_of
from bench.suite import Case
from bench.workloads import Workload
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


def test_measure_gives_each_error_by_its_definition() -> None:
    exact = suite.Exact(torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[6.0, 8.0]]).double())
    found = suite.measure(torch.tensor([[3.0, 5.0]]), exact)
    assert found == suite.Errors(frobenius=1 / 5, largest=1 / 8, mean=1 / 16)
    assert suite.measure(exact.product.float(), exact) == suite.Errors(0.0, 0.0, 0.0)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_measure_never_passes_a_result_that_is_not_finite(special: float) -> None:
    exact = suite.Exact.of(torch.ones(2, 3), torch.ones(4, 3))
    result = exact.product.float()
    result[1, 2] = special
    assert suite.measure(result, exact) == suite.Errors(math.inf, math.inf, math.inf)


def test_measure_where_there_is_nothing_to_be_relative_to() -> None:
    exact = suite.Exact.of(torch.zeros(1, 3), torch.ones(2, 3))
    assert suite.measure(torch.zeros(1, 2), exact) == suite.Errors(0.0, 0.0, 0.0)
    found = suite.measure(torch.tensor([[0.0, 1e-30]]), exact)
    assert (found.frobenius, found.largest) == (math.inf, math.inf)


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


def built(group: str, shape: str = "") -> Workload:
    """The first small case of a group, or with that shape."""
    cases = fp32.fp32_cases(True, False, 0)
    return parts_of(next(case for case in cases if case.group == group and shape in case.shape))[0](CPU)


def test_kept_planes_are_those_of_the_same_weight() -> None:
    for workload in (built(fp32.RESIDUAL), fp32.build_product((4, 8, 8), fp32.MODE, True, CPU)):
        assert workload.kept is not None
        plain, kept = workload.fused(*workload.arguments), workload.kept.fused(*workload.kept.arguments)
        assert torch.equal(plain, kept)
        assert relative_error(plain, workload.reference) < WRONG_ABOVE["fp32"]
    assert fp32.build_product((4, 8, 8), fp32.MODE, False, CPU).kept is None


@pytest.mark.parametrize("group", [fp32.ROW_SUM, fp32.RESIDUAL, fp32.PRODUCT, fp32.FORCED_PRODUCT])
def test_only_what_is_named_so_is_prepared(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, str]] = []
    monkeypatch.setattr(cutfuse.PreparedWeight, "check", lambda weight: used.append((weight.mode, product_mode())))
    workload = built(group)
    workload.fused(*workload.arguments)
    assert "prepared" not in workload.explain().call
    assert used == []
    assert workload.kept is not None
    workload.kept.fused(*workload.kept.arguments)
    assert "prepared weight" in workload.kept.explain().call
    mode = fp32.FORCED if group == fp32.FORCED_PRODUCT else fp32.MODE or product_mode()
    assert used == [(mode, mode)] * 2


def test_products_run_in_the_suites_mode_and_pytorchs_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def record(x: Tensor, weight: Tensor | cutfuse.PreparedWeight) -> Tensor:
        seen.append(product_mode())
        return x @ (weight.weight if isinstance(weight, cutfuse.PreparedWeight) else weight).t()

    monkeypatch.setattr(cutfuse, "linear", record)
    for workload in (built(fp32.TRAINING), built(fp32.FORCED_PRODUCT), built(fp32.PRODUCT, "8x32x32")):
        for each in filter(None, (workload, workload.kept)):
            each.eager(*each.arguments)
            each.fused(*each.arguments)
    mode = fp32.MODE or product_mode()
    assert seen == [mode, fp32.FORCED, fp32.FORCED, mode, mode]


def test_the_training_step_is_checked_in_all_its_results() -> None:
    workload = fp32.build_training((32, 64, 64), CPU)
    for step in (workload.eager, workload.fused):
        y, dx, dw = step(*workload.arguments)
        assert (y.shape, dx.shape, dw.shape) == ((32, 64), (32, 64), (64, 64))
        assert relative_error(workload.collect((y, dx, dw)), workload.reference) < 1e-6
        for wrong in ((1.01 * y, dx, dw), (y, 1.01 * dx, dw), (y, dx, 1.01 * dw)):
            assert relative_error(workload.collect(wrong), workload.reference) > 10 * WRONG_ABOVE["fp32"]
