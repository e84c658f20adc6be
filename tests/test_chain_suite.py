"""The chains suite without measurements: verdicts from given figures, tables and plot, continued and merged runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from chain_figures import COMMIT, OWN_US, Figures, figures_of, full_cases, results_of

from bench import chain_command, chain_report, chain_suite, report
from bench.__main__ import RAW, default_output, main, parse
from bench.cases import TARGET_DEVICE
from bench.chain_cases import Case, all_cases
from bench.chain_contenders import NAMES, SPECIALIZED, chosen
from bench.chain_memory import EAGER_STACK
from bench.chain_suite import GOALS, judge, median, sizes_of
from bench.run_files import title_of
from bench.runner import Budget
from bench.summarise import summarise
from bench.timing import Effort

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
# The project's targets once more, by line, what it is of, and measure; one that changes has to change here too.
NO_FULL = "16-bit, tf32, 40 GFLOP and more, no full operand"
TARGETS = {
    (1, "16-bit, 40 GFLOP and more", "geometric mean"): 0.90,
    (1, "16-bit, 40 GFLOP and more", "worst"): 1.02,
    (2, "16-bit, smaller", "geometric mean"): 1.0,
    (3, NO_FULL, "geometric mean"): 1.08,
    (3, NO_FULL, "worst"): 1.25,
    (4, "16-bit, tf32, 40 GFLOP and more, full operand", "geometric mean"): 1.10,
    (4, "16-bit, tf32, smaller, full operand", "geometric mean"): 1.30,
    (5, 'fp32 at "highest", K of 4096 and more', "geometric mean"): 1.04,
    (5, 'fp32 at "highest", smaller K', "geometric mean"): 1.20,
    (6, "six Light ops", "worst"): 0.95,
    (6, "six Light ops, two Special, bf16", "worst"): 0.80,
    (7, "backward of six Light ops", "worst"): 0.92,
    (8, "six Light ops, reduced, fp32", "worst"): 0.92,
    (8, "six Light ops, reduced, bf16", "worst"): 0.82,
    (9, "training step of linear and gelu, 12608x3072x768, bf16", "worst"): 0.94,
    (9, "training step of linear and gelu, 4096x8192x8192, bf16", "worst"): 0.99,
    (10, "a chain runs specialized, cold", "worst"): 0.5,
    (10, "a chain runs specialized, second process", "worst"): 0.02,
    (10, "30 chains of a model run specialized, cold", "worst"): 5.0,
    (11, "peak memory, training 12 blocks, bf16", "worst"): 1.0,
    (12, "kept between the passes, recomputed, training 12 blocks, bf16", "worst"): 0.75,
}
SHARES = {6, 7, 8}
Key = tuple[int, str, str]


def key_of(line: Figures) -> Key:
    """What tells lines apart."""
    return line["line"], line["what"], line["measure"]


def lines_of(cases: list[Figures], device: str = TARGET_DEVICE) -> dict[Key, Figures]:
    """The judged lines."""
    return {key_of(line): line for line in judge(cases, device, False, 0)}


def slowed(cases: list[Figures], key: Key, factor: float) -> None:
    """Make the specialized kernels of a line's cases slower by a factor, or what its processes wait for."""
    (goal,) = [goal for goal in GOALS if key_of(goal.as_dict()) == key]
    for case in (case for case in cases if goal.covers(case)):
        for name, entry in case["contenders"].items():
            if "wait_s" in entry:
                entry["wait_s"] *= factor
            elif "peak_bytes" in entry and name != EAGER_STACK:
                entry.update({figure: factor * count for figure, count in entry.items()})
            elif name == SPECIALIZED:
                entry["median_us"] *= factor


def test_every_target_has_its_line_and_is_met_by_the_given_figures() -> None:
    lines = lines_of(full_cases())
    assert {key: line["limit"] for key, line in lines.items()} == TARGETS
    assert len(GOALS) == len(TARGETS)
    assert {line["verdict"] for line in lines.values()} == {"met"}
    assert {line["line"] for line in lines.values() if line["unit"] == "share"} == SHARES


@pytest.mark.parametrize("key", TARGETS, ids=str)
def test_a_line_is_met_up_to_its_limit_and_missed_beyond(key: Key) -> None:
    reached = lines_of(full_cases())[key]["value"]
    to_limit = reached / TARGETS[key] if key[0] in SHARES else TARGETS[key] / reached
    for share, verdict in ((0.999, "met"), (1.001, "missed")):
        cases = full_cases()
        slowed(cases, key, share * to_limit)
        line = lines_of(cases)[key]
        expected = TARGETS[key] / share if key[0] in SHARES else TARGETS[key] * share
        assert (line["value"], line["verdict"]) == (pytest.approx(expected), verdict)


def test_lines_have_the_cases_that_they_name() -> None:
    counts = {key: line["cases"] for key, line in lines_of(full_cases()).items()}
    assert counts[1, "16-bit, 40 GFLOP and more", "worst"] == 6 * 7
    assert counts[2, "16-bit, smaller", "geometric mean"] == 3 * 7
    large, small = (counts[4, f"16-bit, tf32, {what}, full operand", "geometric mean"] for what in SIZES)
    assert counts[3, NO_FULL, "worst"] + large == 6 * 10
    assert large > 15
    assert 5 < small < 3 * 10
    assert counts[5, 'fp32 at "highest", K of 4096 and more', "geometric mean"] == 4 * 3
    assert counts[5, 'fp32 at "highest", smaller K', "geometric mean"] == 5 * 3
    assert [counts[key] for key in TARGETS if key[0] in SHARES] == [6, 2, 4, 6, 6]
    assert all(counts[key] == 1 for key in TARGETS if key[0] in (9, 10))
    assert all(counts[key] == 3 for key in TARGETS if key[0] in (11, 12))


SIZES = ("40 GFLOP and more", "smaller")


def case_of(cases: list[Figures], **wanted: Any) -> Figures:
    """The first product's case that has everything that is wanted."""
    return next(
        case
        for case in cases
        if case["group"] == "linear" and all(case.get(name) == value for name, value in wanted.items())
    )


def test_the_best_compiler_counts_and_the_worst_case_is_named() -> None:
    cases = full_cases()
    case = next(case for case in cases if "max-autotune" in case["contenders"] and sizes_of(case)[0] == 4096)
    assert chain_suite.over_fastest(case) == OWN_US / 480.0
    case["contenders"]["compile"]["median_us"] = 200.0
    line = lines_of(cases)[1, "16-bit, 40 GFLOP and more", "worst"]
    assert (line["value"], line["verdict"]) == (2.0, "missed")
    assert line["where"] == f"{case['variant']}, {case['shape']}, {case['precision']}"
    mean = lines_of(cases)[1, "16-bit, 40 GFLOP and more", "geometric mean"]
    assert mean["value"] > lines_of(full_cases())[1, "16-bit, 40 GFLOP and more", "geometric mean"]["value"]


def test_a_chain_is_held_to_the_longer_of_the_product_and_itself() -> None:
    case = next(case for case in full_cases() if "pointwise" in case["contenders"])
    assert chain_suite.over_product_or_chain(case) == OWN_US / 390.0
    case["contenders"]["pointwise"]["median_us"] = 800.0
    assert chain_suite.over_product_or_chain(case) == OWN_US / 800.0
    del case["contenders"]["mm"]
    assert chain_suite.over_product_or_chain(case) is None


def test_operands_are_read_at_the_ceiling_of_a_copy() -> None:
    case = case_of(full_cases(), variant="residual")
    m, n, _ = sizes_of(case)
    reading = 1e6 * m * n * (4 if case["precision"] in ("fp32", "tf32") else 2) / 4.28e12
    assert case["memory_us"] == pytest.approx(reading)
    assert chain_suite.over_product_and_operands("mm", case) == pytest.approx(OWN_US / (390 + reading))
    bare = case_of(full_cases(), variant="relu")
    assert chain_suite.over_product_and_operands("mm", bare) == OWN_US / 390
    assert chain_suite.over_product_and_operands("mm", {**case, "memory_us": None}) is None


def test_there_is_a_verdict_on_whole_lines_of_the_whole_draw_on_the_target_device() -> None:
    assert {line["verdict"] for line in judge(full_cases(), "some other card", False, 0)} == {None}
    assert {line["verdict"] for line in judge(full_cases(), TARGET_DEVICE, True, 0)} == {None}
    assert {line["verdict"] for line in judge([], TARGET_DEVICE, False, 0)} == {"not measured"}
    cases = full_cases()
    case_of(cases, precision="tf32", full=True, shape="4096x11008x4096")["contenders"][SPECIALIZED] = {
        "note": "wrong: relative error 5.0e-01 against fp64"
    }
    verdicts = {key: line["verdict"] for key, line in lines_of(cases).items()}
    (key,) = [key for key, verdict in verdicts.items() if verdict != "met"]
    assert (key[1], verdicts[key]) == ("16-bit, tf32, 40 GFLOP and more, full operand", "not measured")


def test_contenders_are_chosen() -> None:
    assert chosen(None, True, False) == NAMES
    assert set(NAMES) - set(chosen(None, True, True)) == {"max-autotune"}
    assert set(NAMES) - set(chosen(None, False, False)) == {"compile", "max-autotune"}
    assert chosen("specialized, mm", True, False) == ("mm", SPECIALIZED)
    with pytest.raises(ValueError, match="unknown contenders cutfuse; choose from mm"):
        chosen("cutfuse", True, False)


def test_tables_show_verdicts_times_and_chains() -> None:
    cases = full_cases()
    failed = case_of(cases, precision="tf32", full=None, shape="4096x11008x4096")
    failed["contenders"][SPECIALIZED] = {"note": "failed: RuntimeError: no"}
    cases[0]["contenders"][SPECIALIZED]["warned"] = "the driver is too old"
    text = chain_report.markdown(results_of(cases))
    lines = text.splitlines()
    large = "| 1 | 16-bit, 40 GFLOP and more | best torch.compile | 42 of 42: geometric mean | 0.81 | met (≤ 0.90) |"
    assert large in lines
    assert any(line.startswith(f"| 3 | {NO_FULL} |") and "not measured (≤ 1.08)" in line for line in lines)
    share = "| 7 | backward of six Light ops | share of the copy ceiling | 4 of 4: worst, six Light ops, 8192x8192, "
    assert any(line.startswith(share) and line.endswith("| 0.97 | met (≥ 0.92) |") for line in lines)
    assert "| 10 | a chain runs specialized, cold | - | 1 of 1 | 0.3 s | met (≤ 0.5 s) |" in lines
    assert any("| 390 | 800 | 500 | 480 | 700 | 400 |" in line for line in lines)
    assert "| highway | 6 | full | - | s = sigmoid(z); return tanh(s * a + (1 - s) * z) |" in lines
    assert f"- specialized failed: RuntimeError: no ({title_of(failed)})." in lines
    assert f"- cutfuse warned: the driver is too old ({title_of(cases[0])})." in lines
    assert "- Targets: 19 met, 0 missed, 2 not measured." in lines
    assert "- Cases: 148 of 148, drawn with seed 0." in lines
    without = chain_report.markdown(results_of(cases), ("over", "torch.mm us"))
    assert "| over |" not in without
    assert "torch.mm us" not in without
    quick = chain_report.summary(results_of([figures_of(case) for case in all_cases(False, True, 0)], quick=True))
    assert "- A quick run: the beginning of the draw, without max-autotune." in quick
    assert "- No verdict: the targets are those of the whole draw." in quick


def test_a_summary_gives_the_same_tables_and_may_be_committed(tmp_path: Path) -> None:
    cases = full_cases()
    for place, case in enumerate(cases):  # as many digits as a run's figures have
        for entry in case["contenders"].values():
            if "median_us" in entry:
                entry["median_us"] *= 1 + 1e-7 * (place + 1)
    results = results_of(cases)
    summarise(results, tmp_path / "summary.json")
    assert chain_report.markdown(report.load(tmp_path / "summary.json")) == chain_report.markdown(results)


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_the_plot_has_the_lines_and_the_products(tmp_path: Path) -> None:
    from bench import chain_plot

    results = results_of(full_cases())
    ratios, shares = (chain_plot.lines_of(results, unit) for unit in ("ratio", "share"))
    assert [len(lines) for lines in (ratios, shares)] == [11, 5]
    assert [len(cells) for _, cells in shares] == [6, 2, 4, 6, 6]
    assert ratios[0][0]["ratio"] == results["lines"][0]["value"]
    assert chain_plot.label_of(results["lines"][2]) == "2  16-bit, smaller / best torch.compile, geometric mean"
    products = [case for case in results["cases"] if case["group"] == "linear"]
    points = chain_plot.points_of(products, SPECIALIZED, lambda case: median(case, "mm"))
    assert {name: len(own) for name, own in points.items()} == {"bf16": 36, "fp16": 27, "tf32": 27, "fp32": 27}
    assert {value for own in points.values() for _, value in own} == {OWN_US / 390}
    assert chain_plot.write_png(results, tmp_path / "chains.png")
    assert chain_plot.write_png(results_of(results["cases"][:3]), tmp_path / "cut.png")
    assert not chain_plot.write_png(results_of([]), tmp_path / "none.png")


class Runs:
    """Stands for `run_case`: notes which cases run, and gives figures or fails."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, case: Case, **_: Any) -> Figures:
        self.titles.append(case.title)
        if case.title in self.failing:
            raise MemoryError("Tried to allocate 200 GiB")
        return {key: value for key, value in figures_of(case).items() if key not in case.as_dict()}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Cases take no time and have given figures."""
    fake = Runs()
    monkeypatch.setattr(chain_suite, "run_case", fake)
    return fake


def run(output: Path, *arguments: str, commit: str = COMMIT) -> tuple[int, Figures]:
    """Run the suite's small cases; the exit status and what it wrote."""
    command = ["chains", "--device", "cpu", "--commit", commit, "--output", str(output)]
    return main([*command, *arguments]), json.loads(output.with_suffix(".json").read_text())


def test_a_run_that_was_cut_short_is_continued(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = [case.title for case in all_cases(True, False, 0)]
    status, results = run(tmp_path / "run", "--filter", "linear", "--filter", "bf16")
    first = list(runs.titles)
    assert (status, len(results["cases"])) == (0, 12)
    status, results = run(tmp_path / "run")
    assert "Continuing" in capsys.readouterr().out
    assert runs.titles == [*first, *(title for title in whole if title not in first)]
    assert [title_of(case) for case in results["cases"]] == whole
    with pytest.raises(SystemExit, match=r"cannot continue .*: commit is .* Give --fresh"):
        run(tmp_path / "run", commit="f" * 40)
    with pytest.raises(SystemExit, match="seed is 0 in one and 1 in the other"):
        run(tmp_path / "run", "--seed", "1")
    run(tmp_path / "run", "--fresh", "--filter", "training")
    assert len(runs.titles) == len(whole) + 1


def test_a_failing_case_is_recorded_and_may_be_tried_again(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.failing = {"training layer, gelu 8x24x16 bf16"}
    assert run(tmp_path / "run", "--filter", "training")[0] == 1
    assert "failed: MemoryError: Tried to allocate 200 GiB (training layer, gelu" in capsys.readouterr().out
    runs.failing = set()
    assert run(tmp_path / "run", "--filter", "training")[0] == 1
    status, results = run(tmp_path / "run", "--filter", "training", "--retry")
    assert (status, len(results["cases"]), len(runs.titles)) == (0, 1, 2)


def test_the_time_limit_leaves_cases_for_the_next_run(runs: Runs, tmp_path: Path) -> None:
    _, results = run(tmp_path / "run", "--time-limit", "0")
    assert (results["cases"], len(results["left_out"])) == ([], len(all_cases(True, False, 0)))
    assert run(tmp_path / "run")[1]["left_out"] == []


def test_time_is_held_back_by_what_a_case_takes() -> None:
    kinds = {case.title: chain_suite.kind_of(case) for case in all_cases(False, False, 0)}
    assert list(kinds.values()).count("autotuned") == 24
    assert kinds["start one chain 4096x4096x4096 bf16"] == "start"
    budget = Budget(100.0)
    assert budget.expected("autotuned", chain_suite.GUESSES_S["autotuned"]) > 5 * chain_suite.GUESSES_S["plain"]


def test_merged_shards_are_the_whole_run(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, whole = run(tmp_path / "whole")
    for index in (1, 2, 3):
        run(tmp_path / f"part{index}", "--shard", f"{index}/3")
    files = [str(tmp_path / f"part{index}.json") for index in (3, 1, 2)]
    assert main(["merge", *files, "--output", str(tmp_path / "merged")]) == 0
    merged = json.loads((tmp_path / "merged.json").read_text())
    untimed = [[{**case, "seconds": 0} for case in results["cases"]] for results in (merged, whole)]
    assert untimed[0] == untimed[1]
    assert merged["chains"] == whole["chains"]
    for one, other in zip(merged["lines"], whole["lines"], strict=True):
        assert one == {**other, "value": other["value"] and pytest.approx(other["value"], rel=1e-4)}
    report.save({**whole, "suite": "host"}, tmp_path / "host.json")
    with pytest.raises(SystemExit, match="cannot merge: the suites are chains and host"):
        main(["merge", str(tmp_path / "whole.json"), str(tmp_path / "host.json")])
    with pytest.raises(SystemExit, match="the suite is host, and only runs of models or chains go together"):
        main(["merge", str(tmp_path / "host.json"), str(tmp_path / "whole.json")])


def test_cases_are_listed_as_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chains", "--list", "--filter", "linear"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 117
    assert sum(line.endswith(", max-autotune") for line in lines) == 24
    with pytest.raises(SystemExit, match="no case of chains holds nothing like it"):
        main(["chains", "--list", "--filter", "nothing like it"])


def test_a_visit_of_a_device_is_within_its_limit() -> None:
    plan = chain_command.plan(parse(["chains", "--device", "cpu"]))
    assert plan.time_limit_s == 540
    assert chain_suite.effort_of(True, 7) == Effort(chain_suite.QUICK_EFFORT.seconds, 7, 7)
    assert default_output(parse(["chains"]), "NVIDIA H200") == RAW / "chains-nvidia-h200"
    assert default_output(parse(["chains", "--shard", "2/4"]), "NVIDIA H200") == RAW / "chains-nvidia-h200-shard-2-4"
