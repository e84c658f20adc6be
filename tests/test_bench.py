"""The benchmark on the CPU: every suite end to end at small sizes, and the arithmetic behind its columns."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cutfuse
from bench import cases, report, runner, suites, timing
from bench.__main__ import main
from bench.accuracy import relative_error
from bench.ceilings import CEILINGS, Work, ceilings_for, floor_us
from bench.command_line import SUMMARIES
from bench.contenders import CONTENDERS, Run
from bench.workloads import Reference, product_rows

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
H200 = "NVIDIA H200"


def bench(suite: str, output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a suite on the CPU with two rounds; the exit status and what it wrote."""
    status = main([suite, "--device", "cpu", "--rounds", "2", "--output", str(output), *arguments])
    return status, json.loads(output.with_suffix(".json").read_text())


@pytest.mark.parametrize(
    ("suite", "filters", "count"),
    [
        ("reference", ["bf16"], 5),
        ("linear", ["64x1024", "fp32"], 6),
        ("reduce", ["fp32"], 4),
        ("pointwise", ["63x1001", "fp16"], 4),
    ],
)
def test_suite_measures_and_checks_every_contender(
    suite: str, filters: list[str], count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [part for text in filters for part in ("--filter", text)]
    status, results = bench(suite, tmp_path / "run", *arguments)
    assert status == 0
    assert len(results["cases"]) == count
    for case in results["cases"]:
        expected = {"eager", "cutfuse"} | ({"mm"} if "mm" in case["contenders"] else set())
        assert set(case["contenders"]) == expected
        assert ("mm" in expected) == (suite == "linear" or "Linear" in case["group"] or "Gemm" in case["group"])
        for entry in case["contenders"].values():
            assert entry["p10_us"] <= entry["median_us"] <= entry["p90_us"]
            assert entry["rounds"] == 2
            assert 0 <= entry["error"] < 1e-2
        ratio = case["contenders"]["cutfuse"]["median_us"] / case["contenders"]["eager"]["median_us"]
        assert case["ratios"]["eager"] == pytest.approx(ratio, rel=1e-4)
        assert case["accurate"] is True
        assert case["path"]
        assert case["targets"] == []
        assert case["floor_us"] is None
    assert (tmp_path / "run.png").exists() == HAS_MATPLOTLIB
    assert results["machine"]["torch"] == torch.__version__
    assert f"{suite} on " in capsys.readouterr().out


def test_render_gives_markdown_and_a_plot_from_the_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("reference", tmp_path / "run", "--filter", "Sigmoid 256", "--filter", "fp32")
    capsys.readouterr()
    drawing = tmp_path / "again.png"
    arguments = ["render", str(tmp_path / "run.json"), "--markdown", "--without", "path"]
    assert main([*arguments, *(["--png", str(drawing)] if HAS_MATPLOTLIB else [])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| case | shape | precision | eager us | cutfuse us | error eager | error cutfuse |" in lines
    assert any(line.startswith("| Sigmoid | 256x8192 | fp32 |") for line in lines)
    assert drawing.exists() == HAS_MATPLOTLIB


def test_a_plot_that_cannot_be_drawn_names_the_extra_and_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if re.fullmatch(r"bench\.\w*plot|matplotlib(\..*)?", name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    results = tmp_path / "run-2.13.json"
    shutil.copy(next(SUMMARIES.glob("reference-*.json")), results)
    assert main(["render", str(results), "--png", str(tmp_path / "other" / "plot.png")]) == 0
    extra, render = capsys.readouterr().out.splitlines()[-2:]
    assert extra == "No plot: matplotlib is missing. For the plot: pip install 'cutfuse[bench]', then"
    assert render == f"  python -m bench render {results}"


@pytest.mark.parametrize("content", ["{}", "[1]", "not JSON"])
def test_render_refuses_other_files(content: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(content)
    with pytest.raises(SystemExit, match="cannot render"):
        main(["render", str(other)])


def test_default_output_keeps_partial_runs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.__main__.RAW", tmp_path)
    assert main(["reduce", "--device", "cpu", "--rounds", "2", "--filter", "4096x33"]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written - {"reduce-cpu-partial.png"} == {"reduce-cpu-partial.json"}


def test_plain_table_without_rich(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, results = bench("reduce", tmp_path / "run", "--filter", "4096x33")
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report.show(results)
    text = capsys.readouterr().out
    assert "variant" in text
    assert "4096x33" in text


def test_wrong_result_is_not_timed_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CONTENDERS["cutfuse"]

    def prepare(workload: Any) -> Run:
        run = right.prepare(workload)
        assert run is not None
        return Run(lambda: run.launch() * 1.5, run.reference)

    monkeypatch.setitem(CONTENDERS, "cutfuse", replace(right, prepare=prepare))
    status, results = bench("reference", tmp_path / "run", "--filter", "Sigmoid 256", "--filter", "fp32")
    entry = results["cases"][0]["contenders"]["cutfuse"]
    assert status == 1
    assert entry["note"].startswith("wrong: relative error 5.0e-01")
    assert "median_us" not in entry
    assert "median_us" in results["cases"][0]["contenders"]["eager"]


def test_failing_contender_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(workload: Any) -> Run:
        raise RuntimeError(f"no kernel for {workload.arguments[0].shape}")

    monkeypatch.setitem(CONTENDERS, "cutfuse", replace(CONTENDERS["cutfuse"], prepare=prepare))
    status, results = bench("reference", tmp_path / "run", "--filter", "Sigmoid 256", "--filter", "fp32")
    contenders = results["cases"][0]["contenders"]
    assert status == 1
    assert contenders["cutfuse"]["note"] == "failed: RuntimeError: no kernel for torch.Size([256, 8192])"
    assert contenders["eager"]["median_us"] > 0


def test_time_limit_lists_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = bench("pointwise", tmp_path / "run", "--time-limit", "0", "--quick")
    assert status == 0
    assert results["cases"] == []
    assert len(results["left_out"]) == 8
    assert "Cases left out by the time limit" in capsys.readouterr().out


def test_unknown_contender_and_empty_selection_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown contenders fastest; choose from mm, eager"):
        main(["reduce", "--device", "cpu", "--contenders", "eager,fastest"])
    with pytest.raises(SystemExit, match="no case of reduce holds nothing like it"):
        main(["reduce", "--device", "cpu", "--filter", "nothing like it"])


def test_budget_drops_the_slowest_compiler_first() -> None:
    contenders = list(CONTENDERS.values())
    compiled, tuned = CONTENDERS["compile"], CONTENDERS["max-autotune"]
    budget = runner.Budget(limit_s=100)
    for name, seconds in (("case", 1.0), ("compile", 3.0), ("max-autotune", 20.0)):
        budget.note(name, seconds)
    # 10 cases left of 1 + 3 seconds each, and this one: 20 + 1 + 40 fit into 100 seconds, not into 60.
    assert budget.allows(tuned, contenders, cases_left=10)
    budget.limit_s = 60
    assert not budget.allows(tuned, contenders, cases_left=10)
    assert budget.allows(compiled, contenders, cases_left=10)


class RecordingClock:
    """A clock that takes each launch's time from the launch itself."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def start(self, launch: timing.Launch, backlog_us: float) -> timing.Queued:
        assert backlog_us >= 30
        elapsed = float(str(launch()))
        return timing.Queued(lambda: elapsed)

    def wait(self) -> None:
        pass


def test_interleaving_times_each_once_a_round_in_changing_order() -> None:
    clock = RecordingClock()
    launched: list[str] = []

    def launch(name: str, elapsed: float) -> timing.Launch:
        def run() -> float:
            launched.append(name)
            return elapsed

        return run

    names = {"a": 10.0, "b": 20.0, "c": 30.0}
    launches = {name: launch(name, elapsed) for name, elapsed in names.items()}
    timings = timing.interleave(launches, clock, timing.Effort(0.1, 12, 12), seed=3)
    assert {name: found.median_us for name, found in timings.items()} == names
    assert all(found.rounds == 12 for found in timings.values())
    rounds = [tuple(launched[-3 * index - 3 : len(launched) - 3 * index]) for index in range(12)]
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.gpu
@pytest.mark.no_path("times an operation of PyTorch's")
def test_cuda_clock_leaves_out_the_hosts_time() -> None:
    x = torch.ones(1024, device="cuda")

    def launch() -> None:
        time.sleep(1e-3)
        x.neg()

    found = timing.interleave({"slow host": launch}, timing.CudaClock(x.device), timing.Effort(0.1, 5, 5), seed=0)
    assert found["slow host"].host_us > 1000
    assert found["slow host"].median_us < 100


def test_percentile_interpolates() -> None:
    assert timing.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert timing.percentile([7.0], 0.9) == 7.0
    assert timing.percentile([0.0, 10.0], 0.1) == pytest.approx(1.0)


def test_relative_error_covers_every_row_and_never_passes_nan() -> None:
    expected = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(6, 2)
    reference = Reference(lambda start, stop: expected[start:stop], rows=6, elements_per_row=1 << 25)
    assert reference.step == 2
    assert relative_error(expected.float(), reference) == 0
    off = expected.float()
    off[5, 1] += 3
    assert relative_error(off, reference) == pytest.approx(3 / expected.norm().item())
    off[2, 0] = math.nan
    assert relative_error(off, reference) == math.inf
    with pytest.raises(ValueError, match=r"shape \(5, 2\)"):
        relative_error(expected[:5].float(), reference)


def test_product_reference_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 7), torch.randn(11, 7), torch.randn(11)
    expected = x[1:4].double() @ weight.double().t() + bias.double()
    monkeypatch.setattr("bench.workloads.CHUNK_ELEMENTS", 21)
    torch.testing.assert_close(product_rows(x, weight, bias, 1, 4), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("model", "precision", "microseconds"),
    [
        ("Sigmoid", "fp32", 3010),
        ("Sigmoid", "bf16", 1505),
        ("SumReduction", "fp32", 1970),
        ("GemmDivideSumScale", "fp32", 69),
        ("GemmDivideSumScale", "bf16", 34.6),
        ("GemmSigmoidScaleResidual", "tf32", 336),
        ("GemmSigmoidScaleResidual", "bf16", 174),
        ("LinearSigmoidSum", "bf16", 494),
    ],
)
def test_floors_of_the_reference_models_on_an_h200(model: str, precision: str, microseconds: float) -> None:
    found = suites.select("reference", small=False, quick=False, filters=[f"{model} ", f" {precision}"])
    case = next(case for case in found if case.group == model)
    assert floor_us(case.work, precision, ceilings_for(H200)) == pytest.approx(microseconds, rel=0.01)


def test_no_floor_without_measured_ceilings() -> None:
    assert ceilings_for("some other card") is None
    assert floor_us(Work(1, 1), "fp32", None) is None
    assert CEILINGS[0].source


def entries(**medians: float) -> dict[str, dict[str, Any]]:
    """Contenders with these medians and an error of 1e-3."""
    return {
        name.replace("_", "-"): {"median_us": median, "error": 1e-3, "rounding": 2e-3}
        for name, median in medians.items()
    }


def test_verdicts_hold_the_targets_against_the_faster_compiler() -> None:
    found = suites.select("reference", small=False, quick=False, filters=["bf16"])
    by_name = {case.group: case for case in found}

    def verdicts(name: str, device: str = H200, **medians: float) -> list[str]:
        return [target["verdict"] for target in runner.judge(by_name[name], entries(**medians), device)["targets"]]

    residual = "GemmSigmoidScaleResidual"
    assert verdicts(residual, compile=190, max_autotune=180, mm=180, cutfuse=183) == ["met", "met"]
    assert verdicts(residual, compile=190, max_autotune=170, mm=180, cutfuse=183) == ["missed", "met"]
    assert verdicts(residual, compile=200, mm=170, cutfuse=183) == ["met", "missed"]
    assert verdicts(residual, mm=180, cutfuse=183) == ["not measured", "met"]
    assert verdicts("GemmDivideSumScale", compile=180, cutfuse=59) == ["met"]
    assert verdicts("GemmDivideSumScale", compile=180, cutfuse=61) == ["missed"]
    assert verdicts(residual, device="some other card", compile=190, cutfuse=500) == []


def test_accuracy_is_judged_by_eager_plus_one_rounding() -> None:
    case = suites.select("reference", small=False, quick=False, filters=["Sigmoid 4096", "bf16"])[0]
    found = entries(eager=1, cutfuse=1)
    found["cutfuse"]["error"] = 2.9e-3
    assert runner.judge(case, found, H200)["accurate"] is True
    found["cutfuse"]["error"] = 3.1e-3
    assert runner.judge(case, found, H200)["accurate"] is False


@pytest.mark.parametrize("suite", list(suites.SUITES))
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_cases_have_titles_of_their_own(suite: str, small: bool, quick: bool) -> None:
    titles = [case.title for case in suites.select(suite, small=small, quick=quick, filters=[])]
    assert titles
    assert len(titles) == len(set(titles))


def test_reference_models_are_all_measured() -> None:
    assert {model.name for model in cases.MODELS} == set(cutfuse.models.__all__)
