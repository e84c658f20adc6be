"""The fp32 suite on the CPU: it measures, and its tables and plots show what was measured."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fp32_figures import CUBLAS, Figures, changed, full_cases

from bench import fp32_cases as suite
from bench import fp32_report, fp32_suite, machine, report, runner
from bench.__main__ import main
from bench.accuracy_suite import TRADE_OFF_CONTENDERS
from bench.cases import TARGET_DEVICE
from bench.contenders import CONTENDERS
from bench.timing import Effort, Timing
from bench.workloads import Workload

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
CPU = torch.device("cpu")
OTHER_DEVICE = "some other card"


def test_cells_get_their_share_of_the_time_and_no_other_contenders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, list[str]]] = []

    def record(launches: Figures, clock: Any, effort: Effort, seed: int) -> Figures:
        seen.append((effort.seconds, list(launches)))
        return {name: Timing(1.0, 1.0, 1.0, 1.0, 1) for name in launches}

    monkeypatch.setattr(runner, "interleave", record)
    main(["fp32", "--device", "cpu", "--output", str(tmp_path / "run"), "--filter", "64x64"])
    whole = seen[0][0]
    assert seen[:2] == [(whole, ["eager", suite.PLAIN]), (whole, [suite.CUBLAS, suite.PLAIN, suite.KEPT])]
    assert seen[2] == (pytest.approx(suite.CELL_EFFORT * whole), [suite.CUBLAS, suite.PLAIN, suite.KEPT])


def results_of(cases: list[Figures], device: str = TARGET_DEVICE) -> Figures:
    """A results file's content."""
    entry = {"median_us": 2700.0, "error": 1e-6}
    return {
        "schema": report.SCHEMA,
        "suite": "fp32",
        "machine": {**machine.facts(CPU, "0" * 40), "device": device},
        "settings": {"mode": suite.MODE, "contenders": list(CONTENDERS)},
        "cases": cases,
        "lines": fp32_suite.judge(cases, device),
        "left_out": [],
        "trade_off": {"shape": "1024x8192x8192", "contenders": {name: entry for name in TRADE_OFF_CONTENDERS}},
    }


def test_tables_show_times_speed_ups_verdicts_and_where_cublas_ran() -> None:
    text = fp32_report.markdown(results_of(changed(suite.PRODUCT, "128x1024x4096", {suite.PLAIN: 101.0}, CUBLAS)))
    lines = text.splitlines()
    first = "| 1 | GemmSigmoidScaleResidual | 1024x8192x8192 | planes kept | - | 100 | 100 | 100 | 20.0 | 5.00 |"
    assert any(line.startswith(first) and line.endswith("| met (≥ 4.0) |") for line in lines)
    worst = "| 4 | product | 45 shapes: worst at 128x1024x4096 | plain | - | - | - | - | - | 0.99 |"
    assert any(line.startswith(worst) and line.endswith("| met (≥ 1.0; 0.98 where cuBLAS ran) |") for line in lines)
    assert "| 7 | split6 product | 1024x8192x8192 | plain | 100 | - | - | - | 20.0 | 5.00 |" in text
    columns = " | ".join(f"{n}x{k}" for n in suite.GRID[1] for k in suite.GRID[1])
    assert f"| M \\ NxK | {columns} |" in lines
    assert "| 128 | 5.00 | 0.99* |" + " 5.00 |" * 7 in lines
    assert sum(line.startswith("| 64 |") for line in lines) == 1
    assert "- Targets: 12 met, 0 missed, 0 not measured." in lines
    summary = fp32_report.summary(results_of(full_cases(), OTHER_DEVICE))
    assert "| ≥ 4.0 |" in summary
    assert "No verdict" in summary
    assert "M \\ NxK" not in summary


def test_a_run_cut_short_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cases in ([], full_cases()[:3]):
        results = {**results_of(cases), "trade_off": None}
        report.save(results, tmp_path / "cut.json")
        assert main(["render", str(tmp_path / "cut.json"), "--markdown"]) == 0
        assert main(["render", str(tmp_path / "cut.json"), "--png", str(tmp_path / "cut.png")]) == 0
        assert "not measured" in capsys.readouterr().out


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_heat_map_labels_every_cell_and_hatches_those_of_cublas(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from bench import fp32_plot

    results = results_of(changed(suite.PRODUCT, "512x4096x1024", {suite.PLAIN: 80.0}, CUBLAS))
    axes = Figure().subplots()
    fp32_plot.draw_grid(axes, fp32_report.cells_of(results, suite.PRODUCT, suite.PLAIN))
    assert len(axes.patches) == 45
    (hatched,) = [patch for patch in axes.patches if patch.get_hatch()]
    assert (hatched.get_x(), hatched.get_y()) == (2.5, 0.5)  # the fourth column, the second row
    assert Counter(text.get_text() for text in axes.texts) == {"5.00": 44, "1.25": 1}
    slow, equal, fast = (fp32_plot.COLOURS(fp32_plot.SCALE(value)) for value in (0.5, 1.0, 2.0))
    assert slow[2] > slow[0]
    assert equal[:3] == pytest.approx((1, 1, 1), abs=0.02)
    assert fast[0] > fast[2]
    assert fp32_plot.write_png(results, tmp_path / "heat.png")
    assert not fp32_plot.write_png({**results, "cases": [], "lines": []}, tmp_path / "none.png")


def run(output: Path, *arguments: str) -> tuple[int, Figures]:
    """Run the suite on the CPU; the exit status and what it wrote."""
    status = main(["fp32", "--device", "cpu", "--rounds", "2", "--output", str(output), *arguments])
    return status, json.loads(output.with_suffix(".json").read_text())


def test_suite_measures_renders_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = run(tmp_path / "run")
    assert status == 0
    cases = list(suite.fp32_cases(small=True, quick=False))
    assert [case["shape"] for case in results["cases"]] == [case.shape for case in cases]
    for case, expected in zip(results["cases"], cases, strict=True):
        # No compilers on a CPU.
        assert set(case["contenders"]) == set(expected.contenders or ()) - {"compile", "max-autotune"}
        for entry in case["contenders"].values():
            assert entry["median_us"] > 0
            assert entry["error"] < 1e-6
        assert case["path"]
        assert case["contenders"].get(suite.KEPT, case)["path"]
    assert results["settings"]["mode"] == suite.MODE
    assert set(results["trade_off"]["contenders"]) == set(TRADE_OFF_CONTENDERS)
    for line in results["lines"]:
        assert line["verdict"] is None
        assert line["speed_up"] > 0
    assert {path.name for path in tmp_path.glob("*.png")} == ({"run.png", "run-error.png"} if HAS_MATPLOTLIB else set())
    capsys.readouterr()
    assert main(["render", str(tmp_path / "run.json"), "--summary"]) == 0
    assert "| 6 | training step | 32x64x64 | plain |" in capsys.readouterr().out


def test_a_failing_contender_fails_the_run_and_leaves_its_line_unmeasured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {**machine.facts(CPU, None), "device": TARGET_DEVICE}
    monkeypatch.setattr(machine, "facts", lambda *_: facts)

    def fail(workload: Workload) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setitem(CONTENDERS, suite.PLAIN, replace(CONTENDERS[suite.PLAIN], prepare=fail))
    status, results = run(tmp_path / "run", "--filter", "split6")
    assert status == 1
    line = results["lines"][-1]
    assert (line["group"], line["speed_up"], line["verdict"]) == (suite.FORCED_PRODUCT, None, "not measured")


def test_other_suites_have_no_summary(tmp_path: Path) -> None:
    report.save({"schema": report.SCHEMA, "suite": "reduce", "cases": []}, tmp_path / "other.json")
    with pytest.raises(SystemExit, match="only accuracy, chains, fp32, host, models have a summary, not reduce"):
        main(["render", str(tmp_path / "other.json"), "--summary"])
