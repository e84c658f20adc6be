"""The host suite on the CPU: verdicts from fake times, tables and plot, and a small run from end to end."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from host_figures import HALF, Figures, contenders, full_cases, results_of

import cutfuse
from bench import host_cases as suite
from bench import host_report, host_suite, machine, report
from bench.__main__ import RAW, default_output, main, parse
from bench.cases import TARGET_DEVICE
from bench.host_suite import CUTFUSE, PYTORCH, judge
from bench.timing import Effort

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
OTHER_DEVICE = "some other card"
# The table of the project's targets, once more: a target that changes has to change here too.
TARGETS = {
    ("linear and gelu", "worst", "", ""): 0.75,
    ("linear, relu, full operand", "worst", "", ""): 0.65,
    ("linear, gelu, row sum", "worst", "", ""): 0.8,
    ("bare linear", "worst", "", ""): 1.15,
    ("pointwise of one op", "worst", "", ""): 1.5,
    ("pointwise of three ops", "worst", "", ""): 0.7,
    ("sum over a dimension", "worst", "", ""): 1.5,
    ("linear and gelu of any size", "geometric mean", "fp32", ""): 1.0,
    ("linear and gelu of any size", "worst", "fp32", ""): 1.03,
    ("bare linear of any size", "geometric mean", "fp32", ""): None,
    ("bare linear of any size", "worst", "fp32", ""): None,
    ("training step of linear and gelu", "worst", "bf16", ""): 0.9,
    ("training step of linear and gelu", "worst", "fp32", ""): 1.0,
    ("8 compiled layers with gelu", "worst", "", ""): 1.1,
    ("blocks, forward", "worst", "", "12 blocks 384/1536, 197 rows"): 0.65,
    ("blocks, training", "worst", "", "12 blocks 384/1536, 197 rows"): 0.9,
    ("blocks, forward", "worst", "", "12 blocks 768/3072, 1576 rows"): 0.8,
    ("blocks, training", "worst", "", "12 blocks 768/3072, 1576 rows"): 0.95,
    ("compiled blocks, forward", "worst", "", "12 blocks 384/1536, 197 rows"): 1.02,
    ("compiled blocks, forward", "worst", "", "12 blocks 768/3072, 1576 rows"): 1.02,
    ("blocks, forward", "worst", "", "12 blocks 768/3072, 12608 rows"): 0.95,
    ("blocks, training", "worst", "", "12 blocks 768/3072, 12608 rows"): 0.95,
}


def key_of(line: Figures) -> tuple[str, str, str, str]:
    """What tells lines apart."""
    return line["group"], line["measure"], line["precision"], line["shape"]


def lines_of(cases: list[Figures], device: str = TARGET_DEVICE, quick: bool = False) -> dict[tuple[str, ...], Figures]:
    """The judged lines."""
    return {key_of(line): line for line in judge(cases, device, quick)}


def test_every_target_has_its_line() -> None:
    lines = lines_of(full_cases())
    assert {key: line["at_most"] for key, line in lines.items()} == TARGETS
    assert len(host_suite.GOALS) == len(TARGETS)


@pytest.mark.parametrize("key", TARGETS, ids=str)
def test_a_line_is_met_up_to_its_target_and_missed_above(key: tuple[str, str, str, str]) -> None:
    def verdict(ratio: float) -> str | None:
        cases = full_cases()
        for case in cases:
            if case["group"] == key[0] and key[2] in ("", case["precision"]) and key[3] in ("", case["shape"]):
                case["contenders"] = contenders(ratio)
        lines = lines_of(cases)
        (changed,) = [found for other, found in lines.items() if other == key]
        assert changed["ratio"] == pytest.approx(ratio)
        # Lines of other cases stay as they are.
        same_cases = {other for other in lines if (other[0], other[2], other[3]) == (key[0], key[2], key[3])}
        assert all(lines[other]["ratio"] == pytest.approx(HALF) for other in set(lines) - same_cases)
        return changed["verdict"]

    at_most = TARGETS[key]
    if at_most is None:
        assert verdict(0.1) is verdict(9.0) is None
    else:
        assert (verdict(0.999 * at_most), verdict(1.001 * at_most)) == ("met", "missed")


def test_one_slow_shape_misses_the_worst_and_moves_the_mean() -> None:
    cases = full_cases()
    own = [case for case in cases if case["group"] == suite.DRAWN_GELU.name]
    own[7]["contenders"] = contenders(1.5)
    lines = lines_of(cases)
    worst = lines["linear and gelu of any size", "worst", "fp32", ""]
    assert (worst["verdict"], worst["ratio"], worst["where"]) == ("missed", 1.5, f"{own[7]['shape']} fp32")
    assert (worst["pytorch_us"], worst["cutfuse_us"], worst["cases"]) == (40.0, 60.0, 40)
    mean = lines["linear and gelu of any size", "geometric mean", "fp32", ""]
    assert mean["ratio"] == pytest.approx(HALF * 3 ** (1 / 40))
    assert (mean["verdict"], mean["where"], mean["pytorch_us"]) == ("met", "", None)


def test_there_is_a_verdict_for_whole_lines_on_the_target_device_only() -> None:
    assert {line["verdict"] for line in judge(full_cases(), OTHER_DEVICE, False)} == {None}
    assert {line["verdict"] for line in judge([], TARGET_DEVICE, False)} == {"not measured", None}
    cases = full_cases()
    gelu = next(case for case in cases if case["group"] == suite.GELU.name)
    gelu["contenders"][CUTFUSE] = {"note": "failed: RuntimeError: no kernel"}
    (first, *others) = judge(cases, TARGET_DEVICE, False)
    assert (first["verdict"], first["ratio"]) == ("not measured", HALF)
    assert {line["verdict"] for line in others} == {"met", None}


def test_a_quick_run_is_judged_by_its_own_cases() -> None:
    assert {line["verdict"] for line in judge(full_cases(quick=True), TARGET_DEVICE, True)} == {"met", None}
    verdicts = [line["verdict"] for line in judge(full_cases(quick=True), TARGET_DEVICE, False)]
    assert verdicts.count("not measured") == 12  # all that have more shapes in a full run, and a target


def test_tables_show_times_ratios_and_verdicts() -> None:
    results = results_of(full_cases(row_sum=0.81))
    lines = host_report.summary(results).splitlines()
    headings = "| line | call | over | time | shape | PyTorch us | cutfuse us | ratio | target |"
    assert headings in lines
    (row_sum,) = [line for line in lines if line.startswith("| 3 |")]
    assert row_sum.startswith(
        "| 3 | linear, gelu, row sum | linear, gelu, sum | host | 5 shapes: worst at 197x1536x384"
    )
    assert row_sum.endswith("| 40.0 | 32.4 | 0.81 | missed (≤ 0.8) |")
    assert (
        "| 7 | linear and gelu of any size | linear, gelu | whole | 40 shapes: geometric mean, fp32 | - | - | 0.50 | "
        "met (≤ 1) |"
    ) in lines
    stack = "12 blocks 384/1536, 197 rows bf16"
    assert f"| 10 | blocks, forward | eager | whole | {stack} | 40.0 | 20.0 | 0.50 | met (≤ 0.65) |" in lines
    bare = [line for line in lines if line.startswith("| 7 | bare linear of any size")]
    assert len(bare) == 2
    assert all(line.endswith("| 0.50 | - |") for line in bare)
    assert "- Targets: 19 met, 1 missed, 0 not measured." in lines
    assert any(line.startswith("- host: ") for line in lines)
    assert any(line.startswith("- whole: ") for line in lines)
    assert not any("quick" in line for line in lines)
    assert "- A quick run: fewer shapes, and fewer turns of each." in host_report.summary(
        results_of(full_cases(quick=True), quick=True)
    )
    text = host_report.markdown(results, ("over",))
    assert headings.replace("| over ", "") in text
    assert "| blocks, forward | whole | 12 blocks 384/1536, 197 rows | bf16 | 40.0 | 20.0 | 0.50 |" in text
    assert text.count("| bare linear |") == 1 + 10


def test_failures_and_what_was_left_out_are_told() -> None:
    cases = full_cases()
    cases[0]["contenders"][CUTFUSE] = {"note": "wrong: relative error 5.0e-01 against fp64"}
    cases[1].update(contenders={}, note="failed: OutOfMemoryError: of 3 GB")
    results = {**results_of(cases, OTHER_DEVICE), "left_out": ["a case", "another"]}
    text = host_report.markdown(results)
    assert f"- cutfuse wrong: relative error 5.0e-01 against fp64 (linear and gelu {cases[0]['shape']} bf16)." in text
    assert "- failed: OutOfMemoryError: of 3 GB (linear and gelu" in text
    assert "- Cases left out by the time limit: a case; another." in text
    assert f"- No verdict: the targets are those of an {TARGET_DEVICE}." in text
    assert "| 40.0 | wrong | - |" in text


def test_the_results_of_a_full_run_are_small(tmp_path: Path) -> None:
    cases = full_cases()
    for index, case in enumerate(cases):  # as many digits as a run's figures have
        for entry in case["contenders"].values():
            entry.update({key: entry[key] * (1 + 1e-5 * (index + 1)) for key in ("median_us", "p10_us", "p90_us")})
    report.save(results_of(cases), tmp_path / "full.json")
    assert (tmp_path / "full.json").stat().st_size < 50_000


def test_a_run_cut_short_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cases in ([], full_cases()[:3]):
        report.save(results_of(cases), tmp_path / "cut.json")
        assert main(["render", str(tmp_path / "cut.json"), "--markdown"]) == 0
        assert main(["render", str(tmp_path / "cut.json"), "--png", str(tmp_path / "cut.png")]) == 0
        assert "not measured" in capsys.readouterr().out


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_the_plot_has_a_bar_a_mark_and_dots_for_each_line(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from bench import host_plot

    results = results_of(full_cases(row_sum=0.9))
    axes = Figure().subplots()
    host_plot.draw_lines(axes, results, results["lines"])
    assert [patch.get_width() for patch in axes.patches] == [line["ratio"] for line in results["lines"]]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels[2] == "3  linear, gelu, row sum (host)"
    assert labels[14] == "10  blocks, forward, 12 blocks 384/1536, 197 rows (whole)"
    assert [text.get_text() for text in axes.texts][1:3] == ["0.50, met", "0.90, missed"]
    marks = [list(mark.get_xdata()) for mark in axes.lines if mark.get_linewidth() == 1.6]
    assert marks == [[target] * 2 for target in TARGETS.values() if target is not None]
    dots = [len(mark.get_xdata()) for mark in axes.lines if mark.get_marker() == "."]
    assert dots == [line["cases"] for line in results["lines"]]
    points = host_plot.drawn_points(results)
    assert {name: len(found) for name, found in points.items()} == {
        suite.DRAWN_GELU.name: 40,
        suite.DRAWN_BARE.name: 8,
    }
    assert host_plot.write_png(results, tmp_path / "host.png")
    only_lines = results_of([case for case in results["cases"] if case["group"] == suite.GELU.name])
    assert host_plot.write_png(only_lines, tmp_path / "lines.png")
    assert not host_plot.write_png(results_of([]), tmp_path / "none.png")


def run(output: Path, *arguments: str) -> tuple[int, Figures]:
    """Run the suite on the CPU; the exit status and what it wrote."""
    status = main(["host", "--device", "cpu", "--rounds", "2", "--output", str(output), *arguments])
    return status, json.loads(output.with_suffix(".json").read_text())


@pytest.mark.usefixtures("one_thread")
def test_suite_measures_renders_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = run(tmp_path / "run")
    assert status == 0
    cases = [case.as_dict() for case in suite.host_cases(small=True, quick=False)]
    assert [{key: case[key] for key in ("group", "shape", "precision")} for case in results["cases"]] == cases
    for case in results["cases"]:
        assert set(case["contenders"]) == {PYTORCH, CUTFUSE}
        assert case["rounds"] == 2
        for entry in case["contenders"].values():
            assert 0 < entry["p10_us"] <= entry["median_us"] <= entry["p90_us"]
    assert all(line["verdict"] is None for line in results["lines"])
    assert results["lines"][0]["ratio"] > 0
    assert results["settings"]["turns"]["host"] == {"warm_calls": 2, "timed_calls": 10, "waits_inside": False}
    assert (tmp_path / "run.png").exists() == HAS_MATPLOTLIB
    capsys.readouterr()
    assert main(["render", str(tmp_path / "run.json"), "--summary"]) == 0
    assert "| 1 | linear and gelu | linear, gelu | host | 2 shapes: worst at" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_lines_are_chosen_by_their_titles(tmp_path: Path) -> None:
    status, results = run(tmp_path / "run", "--filter", "pointwise of three", "--filter", "FP32")
    assert status == 0
    assert {(case["group"], case["precision"]) for case in results["cases"]} == {(suite.THREE_OPS.name, "fp32")}
    assert results["settings"]["filter"] == ["pointwise of three", "FP32"]
    with pytest.raises(SystemExit, match="no case of host holds nothing like it"):
        main(["host", "--device", "cpu", "--filter", "nothing like it"])


@pytest.mark.usefixtures("one_thread")
def test_a_failing_call_fails_the_run_and_leaves_its_line_unmeasured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {**machine.facts(torch.device("cpu"), None), "device": TARGET_DEVICE}
    monkeypatch.setattr(machine, "facts", lambda *_: facts)

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(cutfuse, "sum", fail)
    status, results = run(tmp_path / "run", "--filter", "sum over")
    assert status == 1
    line = next(line for line in results["lines"] if line["group"] == suite.SUM.name)
    assert (line["ratio"], line["verdict"]) == (None, "not measured")
    assert results["cases"][0]["contenders"][CUTFUSE] == {"note": "failed: RuntimeError: no kernel"}
    assert results["cases"][0]["contenders"][PYTORCH]["median_us"] > 0


@pytest.mark.usefixtures("one_thread")
def test_calls_are_timed_when_their_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    timed = host_suite.time_in_turns
    monkeypatch.setattr(cutfuse, "wait", lambda *_: events.append("waited") or 0)
    monkeypatch.setattr(host_suite, "time_in_turns", lambda *given: events.append("timed") or timed(*given))
    case = next(case for case in suite.host_cases(small=True, quick=True) if case.group == suite.GELU)
    host_suite.run_case(case, torch.device("cpu"), Effort(0.01, 2, 2), seed=0)
    assert events == ["waited", "timed"]


def test_time_limit_lists_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = run(tmp_path / "run", "--time-limit", "0")
    assert status == 0
    assert results["cases"] == []
    assert results["settings"]["time_limit_s"] == 0
    assert len(results["left_out"]) == len(list(suite.host_cases(small=True, quick=False)))
    assert "Cases left out by the time limit" in capsys.readouterr().out


def test_quick_runs_are_short_and_kept_apart() -> None:
    assert host_suite.QUICK_TIME_LIMIT_S < 40
    assert host_suite.effort_of(True, None).seconds < host_suite.effort_of(False, None).seconds / 5
    assert host_suite.effort_of(True, 7) == Effort(host_suite.QUICK_EFFORT.seconds, 7, 7)
    options = parse(["host", "--quick"])
    assert default_output(options, "NVIDIA H200") == RAW / "host-nvidia-h200-partial"
    assert default_output(parse(["host"]), "NVIDIA H200") == RAW / "host-nvidia-h200"
