"""The accuracy suite on the CPU: its inputs are what they say, its metric and verdicts can fail, and it runs."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cutfuse
from bench import accuracy_report, machine
from bench import accuracy_suite as suite
from bench.__main__ import main
from bench.distributions import BY_NAME, DISTRIBUTIONS, HUGE_ROWS
from cutfuse.precision import product_mode

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
CPU = torch.device("cpu")
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


def test_measure_where_there_is_nothing_to_be_relative_to() -> None:
    exact = suite.Exact.of(torch.zeros(1, 3), torch.ones(2, 3))
    assert suite.measure(torch.zeros(1, 2), exact) == suite.Errors(0.0, 0.0, 0.0)
    found = suite.measure(torch.tensor([[0.0, 1e-30]]), exact)
    assert (found.frobenius, found.largest) == (math.inf, math.inf)


def test_measure_refuses_another_shape() -> None:
    exact = suite.Exact.of(torch.zeros(1, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"shape \(2, 1\), the exact product \(1, 2\)"):
        suite.measure(torch.zeros(2, 1), exact)


def test_ratio_of_errors() -> None:
    assert suite.ratio(0.0, 0.0) == 1
    assert suite.ratio(1e-9, 0.0) == math.inf
    assert suite.ratio(0.0, 1e-9) == 0
    assert suite.ratio(2e-9, 1e-9) == 2
    assert suite.ratio(math.inf, math.inf) == math.inf  # neither gave a result: no reason to pass


def test_geometric_mean_is_not_carried_by_cells_without_an_error() -> None:
    assert suite.geometric_mean([0.25, 1.0]) == pytest.approx(0.5)
    assert suite.geometric_mean([0.0, 1.0]) == pytest.approx(suite.LEAST_RATIO**0.5)
    assert suite.geometric_mean([0.1, math.inf]) == math.inf


def figures(ratios: list[float | None], route: str = "product", exact_error: float | None = None) -> dict[str, Any]:
    """A case with these ratios, and "guarded" with an error on integers."""
    return {
        "route": route,
        "distribution": "normal",
        "k": 64,
        "is_exact": exact_error is not None,
        "contenders": {suite.GUARDED: {"largest": 1e-8 if exact_error is None else exact_error}},
        "ratios": dict(zip(suite.MEASURES, ratios, strict=True)),
    }


def verdicts(*cases: dict[str, Any]) -> dict[str, bool]:
    return {verdict["what"]: verdict["met"] for verdict in suite.judge(list(cases))}


def test_contract_is_judged_for_each_route() -> None:
    met = {"product: geometric mean": True, "product: worst cell": True}
    assert verdicts(figures([0.4, 0.5, 2.05])) == met
    assert verdicts(figures([0.4, 0.5, 2.11])) == {**met, "product: worst cell": False}
    assert verdicts(figures([0.81, 0.8, 0.8])) == {**met, "product: geometric mean": False}
    assert not any(verdicts(figures([0.5, 0.5, math.inf])).values())
    both = verdicts(figures([0.5] * 3), figures([0.9] * 3, route="dW"))
    assert both == {**met, "dW: geometric mean": False, "dW: worst cell": True}
    worst = suite.judge([figures([0.5, 0.5, 0.5]), figures([0.5, 0.9, 0.5])])[1]
    assert (worst["value"], worst["where"]) == (0.9, "normal, K=64, largest")


def test_integers_have_to_be_exact() -> None:
    assert verdicts(figures([1, 1, 1], exact_error=0.0))["product: error of integers"] is True
    assert verdicts(figures([1, 1, 1], exact_error=1e-12))["product: error of integers"] is False
    missing = figures([1, 1, 1], exact_error=0.0)
    missing["contenders"][suite.GUARDED] = {"note": "failed: no memory"}
    assert verdicts(missing)["product: error of integers"] is False


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
    found = suite.cases(small, quick=False, filters=[])
    assert len({case.title for case in found}) == len(found)
    depths = {case.k for case in found if case.route == "product"}
    assert depths == ({64, 1000} if small else {64, 1000, 8192, 32768})
    for route in suite.ROUTES:
        assert {case.distribution for case in found if case.route == route} == set(NAMES)


def run(output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the suite on the CPU; the exit status and what it wrote."""
    status = main(["accuracy", "--device", "cpu", "--rounds", "2", "--output", str(output), *arguments])
    return status, json.loads(output.with_suffix(".json").read_text())


def test_suite_measures_renders_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = run(tmp_path / "run", "--filter", "K=64")
    assert status == 0
    assert len(results["cases"]) == len(NAMES)
    for case in results["cases"]:
        assert set(case["contenders"]) == set(suite.CONTENDERS)
        assert case["ratios"] == dict.fromkeys(suite.MEASURES, 1.0)  # a CPU has one fp32 product
        assert case["contenders"]["bf16"]["mean"] > case["contenders"][suite.CUBLAS]["mean"]
        ours = case["contenders"][suite.GUARDED]
        assert case["is_exact"] == (ours["largest"] == 0)
        assert 0 <= ours["mean"] <= ours["largest"] < 1e-3
    assert results["verdicts"] == []
    assert results["machine"]["torch"] == torch.__version__
    assert tuple(results["trade_off"]["contenders"]) == suite.TRADE_OFF_CONTENDERS
    for entry in results["trade_off"]["contenders"].values():
        assert entry["median_us"] > 0
        assert 0 < entry["error"] < 1e-2
    assert (tmp_path / "run.png").exists() == HAS_MATPLOTLIB
    assert "No verdict" in capsys.readouterr().out
    assert main(["render", str(tmp_path / "run.json"), "--markdown", "--without", "tf32"]) == 0
    text = capsys.readouterr().out
    assert "| route | K | inputs | cuBLAS fp32 | guarded | split3 | split6 | bf16 | guarded / cuBLAS fp32 |" in text
    assert "| product | 64 | integers below 2^11 | 0.0e+00 0.0e+00 0.0e+00 |" in text
    assert main(["render", str(tmp_path / "run.json"), "--summary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "| inputs | K | cuBLAS fp32 | guarded | split3 | split6 | tf32 | bf16 | largest guarded / cuBLAS fp32 |"
        in lines
    )
    rows = [line.split(" | ") for line in lines if line.startswith(("| normal |", "| integers"))]
    assert [(row[1], row[-1]) for row in rows] == [("64", "1.00 |"), ("64", "1.00 |")]
    assert "| cuBLAS tf32 |" in "\n".join(lines)


def test_summary_takes_the_deepest_product_and_the_largest_ratio_of_all() -> None:
    def case(route: str, k: int, error: float, ratios: list[float | None]) -> dict[str, Any]:
        return {**figures(ratios, route), "k": k, "contenders": {suite.GUARDED: {"frobenius": error}}}

    cases = [
        case("product", 8192, 2e-7, [0.5, 0.5, 0.5]),
        case("product", 64, 1e-7, [0.5, 0.75, 0.5]),
        case("dW", 1000, 3e-7, [0.5, 0.5, 0.6]),
    ]
    headings, rows = accuracy_report.summary_table({"cases": cases})
    (row,) = [dict(zip(headings, (cell.text for cell in row), strict=True)) for row in rows]
    assert (row["inputs"], row["K"], row["guarded"]) == ("normal", "8192", "2.0e-07")
    assert row["largest guarded / cuBLAS fp32"] == "0.75"
    assert row["bf16"] == "-"
    cases.append(case("dX", 1000, 3e-7, [None, 0.5, 0.6]))  # JSON's infinity
    assert accuracy_report.summary_table({"cases": cases})[1][0][-1].text == "inf"


def test_a_worse_product_misses_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = machine.facts(CPU, None)
    monkeypatch.setattr(machine, "facts", lambda *_: {**facts, "cutfuse_kernels": True, "capability": "9.0"})
    linear = cutfuse.linear
    monkeypatch.setattr(cutfuse, "linear", lambda x, weight: linear(x, weight) * (1 + 2.0**-20))
    status, results = run(tmp_path / "run", "--filter", "product", "--filter", "K=64")
    assert status == 1
    found = {verdict["what"]: verdict for verdict in results["verdicts"]}
    assert [verdict["met"] for verdict in found.values()] == [False] * 3
    assert found["product: worst cell"]["value"] is None  # infinite: cuBLAS has no error on integers
    assert "product: worst cell: inf, at most 2.1: missed (integers" in capsys.readouterr().out
    assert main(["render", str(tmp_path / "run.json"), "--markdown"]) == 0
    assert "product: worst cell: inf, at most 2.1: missed (integers" in capsys.readouterr().out


def test_a_failing_contender_leaves_the_others_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(cutfuse, "linear", fail)
    status, results = run(tmp_path / "run", "--filter", "product normal K=64")
    assert status == 1
    (case,) = results["cases"]
    assert case["contenders"][suite.GUARDED] == {"note": "failed: RuntimeError: no kernel"}
    assert case["contenders"][suite.CUBLAS]["mean"] > 0
    assert case["ratios"] == dict.fromkeys(suite.MEASURES, None)
    assert "failed: RuntimeError: no kernel" in capsys.readouterr().out


def test_an_empty_selection_is_refused() -> None:
    with pytest.raises(SystemExit, match="no case of accuracy holds nothing like it"):
        main(["accuracy", "--device", "cpu", "--filter", "nothing like it"])
