"""The models suite on a CPU: cases, verdicts from given figures, tables and plot, continued and merged runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from model_figures import COMMIT, RATIO, Figures, figures_of, full_cases, results_of

from bench import model_files, model_report, model_suite, model_zoo, report
from bench.__main__ import RAW, default_output, main, parse
from bench.cases import TARGET_DEVICE
from bench.model_cases import Case, Shard, all_cases, key_of, select, weight_of
from bench.model_suite import judge
from bench.summarise import summarise

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
# The project's targets once more: line, figure, measure; one that changes has to change here too.
TARGETS = {
    **{(1, figure, "geometric mean"): 0.93 for figure in ("gpu_us", "wall_us")},
    **{(1, figure, "worst"): 1.01 for figure in ("gpu_us", "wall_us")},
    **{(2, figure, "geometric mean"): 0.93 for figure in ("gpu_us", "wall_us")},
    **{(2, figure, "worst"): 1.01 for figure in ("gpu_us", "wall_us")},
    **{(3, figure, "geometric mean"): 0.45 for figure in ("gpu_us", "wall_us")},
    **{(3, figure, "worst"): 0.8 for figure in ("gpu_us", "wall_us")},
    **{(4, figure, "worst"): 1.01 for figure in ("gpu_us", "wall_us")},
    **{(5, figure, "geometric mean"): 0.96 for figure in ("gpu_us", "wall_us")},
    **{(6, figure, "geometric mean"): 0.45 for figure in ("gpu_us", "wall_us")},
    (7, "cold_s", "worst"): 1.1,
    (8, "graphs", "worst"): 1.0,
    (9, "error", "worst"): 1.1,
    (10, "gradient_error", "worst"): 1.1,
}


def lines_of(cases: list[Figures], device: str = TARGET_DEVICE) -> dict[tuple[Any, ...], Figures]:
    """The judged lines by what tells them apart."""
    return {(line["line"], line["figure"], line["measure"]): line for line in judge(cases, device, False)}


def scaled(cases: list[Figures], line: Figures, ratio: float) -> None:
    """Put the line's own contender at `ratio` times the other, in every case of the line."""
    for case in cases:
        if model_suite.covers(line, case) and model_suite.pair_of(line, case):
            _, rival = model_suite.pair_of(line, case)  # type: ignore[misc]
            case["contenders"][line["own"]][line["figure"]] = ratio * rival


def test_every_target_has_its_line() -> None:
    assert {key: line["at_most"] for key, line in lines_of(full_cases()).items()} == TARGETS
    assert len(model_suite.GOALS) == len(TARGETS)


@pytest.mark.parametrize("key", TARGETS, ids=str)
def test_a_line_is_met_up_to_its_target_and_missed_above(key: tuple[Any, ...]) -> None:
    verdicts = []
    for share in (0.999, 1.001):
        cases = full_cases()
        scaled(cases, lines_of(cases)[key], share * TARGETS[key])
        line = lines_of(cases)[key]
        assert line["ratio"] == pytest.approx(share * TARGETS[key])
        verdicts.append(line["verdict"])
    assert verdicts == ["met", "missed"]


@pytest.mark.parametrize("faster", ["eager", "compile"])
def test_a_rival_is_the_faster_of_eager_and_torch_compile(faster: str) -> None:
    cases = full_cases()
    for case in cases:
        if "gpu_us" in case["contenders"].get(faster, {}):
            case["contenders"][faster]["gpu_us"] /= 5
    line = lines_of(cases)[1, "gpu_us", "worst"]
    assert (line["ratio"], line["verdict"]) == (pytest.approx(5 * RATIO), "missed")
    del next(case for case in cases if model_suite.covers(line, case))["contenders"][faster]
    assert lines_of(cases)[1, "gpu_us", "worst"]["verdict"] == "not measured"


def test_the_committed_lines_are_those_of_the_committed_cases() -> None:
    results = report.committed("models")
    lines = judge(results["cases"], results["machine"]["device"], quick=False)
    assert results["lines"] == report.tidy(lines, 6)


def test_lines_have_the_cases_that_they_name() -> None:
    counts = {key: line["cases"] for key, line in lines_of(full_cases()).items()}
    assert counts[1, "gpu_us", "worst"] == 24  # 12 models, two batches
    assert counts[3, "gpu_us", "worst"] == counts[4, "gpu_us", "worst"] == 12
    assert counts[5, "wall_us", "geometric mean"] == counts[6, "wall_us", "geometric mean"] == 11
    assert counts[7, "cold_s", "worst"] == counts[8, "graphs", "worst"] == 12
    assert (counts[9, "error", "worst"], counts[10, "gradient_error", "worst"]) == (24, 22)


def test_a_compilation_may_take_a_second_more_or_a_tenth() -> None:
    def verdict(compile_s: float, cutfuse_s: float) -> tuple[str, float]:
        cases = full_cases()
        own = next(case for case in cases if case["variant"] == "compilation")
        own["contenders"] = {
            "compile": {"graphs": 2, "cold_s": compile_s},
            "cutfuse": {"cold_s": cutfuse_s, "graphs": 2},
        }
        line = lines_of(cases)[7, "cold_s", "worst"]
        return line["verdict"], line["ratio"]

    assert verdict(2.0, 2.99)[0] == "met"
    assert verdict(2.0, 3.01) == ("missed", pytest.approx(1.505))
    assert verdict(40.0, 43.9)[0] == "met"
    assert verdict(40.0, 44.1)[0] == "missed"


def test_the_worst_case_is_named() -> None:
    cases = full_cases()
    slow = next(case for case in cases if key_of(case) == ("Swin-B", "forward", "batch 128", "bf16"))
    slow["contenders"]["cutfuse"]["gpu_us"] = 6000.0
    lines = lines_of(cases)
    worst = lines[1, "gpu_us", "worst"]
    assert (worst["verdict"], worst["ratio"], worst["where"]) == ("missed", 1.2, "Swin-B, batch 128, bf16")
    assert lines[1, "wall_us", "worst"]["verdict"] == lines[2, "gpu_us", "worst"]["verdict"] == "met"
    assert lines[1, "gpu_us", "geometric mean"]["ratio"] == pytest.approx(RATIO * 3 ** (1 / 24))


def test_there_is_a_verdict_on_whole_lines_of_whole_models_on_the_target_device() -> None:
    assert {line["verdict"] for line in judge(full_cases(), "some other card", False)} == {None}
    assert {line["verdict"] for line in judge(full_cases(True), TARGET_DEVICE, True)} == {None}
    assert {line["verdict"] for line in judge([], TARGET_DEVICE, False)} == {"not measured"}
    cases = full_cases()
    cases[0]["contenders"]["cutfuse"] = {"note": "failed: RuntimeError: no kernel"}
    verdicts = {key: line["verdict"] for key, line in lines_of(cases).items()}
    assert {key for key, verdict in verdicts.items() if verdict != "met"} == {
        (1, figure, measure) for figure in ("gpu_us", "wall_us") for measure in ("geometric mean", "worst")
    }


def test_a_model_has_its_cases_and_every_title_is_its_own() -> None:
    for is_small in (False, True):
        cases = all_cases(is_small)
        assert len({case.title for case in cases}) == len(cases) == 106
        assert all(case.is_small == is_small for case in cases)
    titles = [case.title for case in all_cases(False) if case.model.name == "ViT-B/16"]
    assert titles == [
        "ViT-B/16 forward batch 1 bf16",
        "ViT-B/16 forward batch 256 bf16",
        "ViT-B/16 training batch 64 bf16",
        "ViT-B/16 forward batch 1 fp32",
        "ViT-B/16 forward batch 256 fp32",
        "ViT-B/16 training batch 64 fp32",
        "ViT-B/16 compilation batch 1 bf16",
        "ViT-B/16 errors batch 1 bf16",
        "ViT-B/16 errors batch 1 fp32",
    ]
    batches = {case.batch for case in all_cases(False) if case.model.name.startswith("DLRM")}
    assert batches == {2048, 65536}


def test_shards_divide_the_cases() -> None:
    cases = all_cases(False)
    parts = [Shard(index, 4).of(cases) for index in (1, 2, 3, 4)]
    assert sorted(case.title for part in parts for case in part) == sorted(case.title for case in cases)
    assert [case.title for case in parts[1][:2]] == [cases[1].title, cases[5].title]
    assert Shard.parse("2/4") == Shard(2, 4)
    for wrong in ("0/4", "5/4", "2", "a/b", "1/0"):
        with pytest.raises(ValueError, match="a shard is written as 1/4"):
            Shard.parse(wrong)


@pytest.mark.parametrize("filters", [[], ["forward", "bf16"]])
def test_shards_are_as_heavy_as_each_other(filters: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_zoo, "installed_version", lambda package: "1")
    shards = Shard(), Shard(1, 2), Shard(2, 2)
    whole, *parts = (select(is_small=False, filters=filters, shard=shard) for shard in shards)
    assert sorted(case.title for part in parts for case in part) == sorted(case.title for case in whole)
    first, second = (sum(map(weight_of, part)) for part in parts)
    assert first == pytest.approx(second, rel=0.1)
    for part in parts:
        assert part == [case for case in whole if case in part]


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where timm and transformers are not installed."""
    monkeypatch.setattr(model_zoo, "installed_version", lambda package: None)
    monkeypatch.setattr(model_suite, "installed_version", lambda package: None)


@pytest.mark.usefixtures("plain_torch")
def test_without_packages_their_models_are_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = select(is_small=False, filters=["TRAINING", "bf16"], shard=Shard())
    assert [case.title for case in found] == [
        "DLRM bottom MLP training batch 65536 bf16",
        "DLRM top MLP training batch 65536 bf16",
    ]
    assert main(["models", "--list", "--quick", "--filter", "top", "--filter", "forward", "--shard", "1/2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["DLRM top MLP forward batch 32 fp32", "DLRM top MLP forward batch 128 fp32"]
    assert lines[2].startswith("timm is not installed, so these models are left out: ViT-B/16, ConvNeXt-B, ")
    assert 'Llama 1B, one token (pip install "cutfuse[models]").' in lines[3]
    with pytest.raises(SystemExit, match="no case of models holds ViT"):
        main(["models", "--list", "--filter", "ViT"])
    with pytest.raises(SystemExit, match="a shard is written as"):
        main(["models", "--list", "--shard", "3"])


class Runs:
    """Stands for `run_case`: notes which cases run, and gives figures or fails."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, case: Case, *_: Any) -> Figures:
        self.titles.append(case.title)
        if case.title in self.failing:
            raise MemoryError("Tried to allocate 200 GiB")
        return {key: value for key, value in figures_of(case).items() if key not in case.as_dict()}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Cases take no time and have given figures."""
    fake = Runs()
    monkeypatch.setattr(model_suite, "run_case", fake)
    monkeypatch.setattr(model_suite, "start_compiler", lambda device: None)
    monkeypatch.setattr(model_suite, "free", lambda device: None)
    return fake


def run(output: Path, *arguments: str, commit: str = COMMIT) -> tuple[int, Figures]:
    """Run the suite of the MLPs; the exit status and what it wrote."""
    command = ["models", "--device", "cpu", "--filter", "DLRM", "--commit", commit, "--output", str(output)]
    return main([*command, *arguments]), json.loads(output.with_suffix(".json").read_text())


def test_a_run_that_was_cut_short_is_continued(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = run(tmp_path / "run", "--filter", "top", "--filter", "fp32")
    assert status == 0
    first = list(runs.titles)
    assert len(first) == len(results["cases"]) == 4
    _, results = run(tmp_path / "run")
    assert "Continuing" in capsys.readouterr().out
    assert len(runs.titles) == len(set(runs.titles)) == len(results["cases"]) == 18
    assert [model_files.title_of(case) for case in results["cases"]] == [case.title for case in all_cases(True)[:18]]
    assert results["lines"][0]["cases"] == 4
    run(tmp_path / "run", "--fresh", "--filter", "errors")
    assert len(runs.titles) == 18 + 4


def test_only_a_run_of_the_same_code_is_continued(runs: Runs, tmp_path: Path) -> None:
    run(tmp_path / "run", "--filter", "errors")
    with pytest.raises(SystemExit, match=r"cannot continue .*: commit is .* Give --fresh"):
        run(tmp_path / "run", commit="f" * 40)
    with pytest.raises(SystemExit, match="rounds is"):
        run(tmp_path / "run", "--rounds", "3")
    run(tmp_path / "changed", "--filter", "errors", commit=f"{COMMIT} with changes")
    with pytest.raises(SystemExit, match="with changes, so that the code may differ"):
        run(tmp_path / "changed", commit=f"{COMMIT} with changes")
    assert len(runs.titles) == 8


def test_a_failing_case_is_recorded_and_may_be_tried_again(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = "DLRM top MLP training batch 128 fp32"
    runs.failing = {failing}
    status, results = run(tmp_path / "run", "--filter", "fp32")
    assert status == 1
    assert len(results["cases"]) == 8
    text = capsys.readouterr().out
    assert f"failed: MemoryError: Tried to allocate 200 GiB ({failing})" in text
    runs.failing, runs.titles = set(), []
    assert run(tmp_path / "run", "--filter", "fp32")[0] == 1
    assert runs.titles == []
    status, results = run(tmp_path / "run", "--filter", "fp32", "--retry")
    assert (status, runs.titles, len(results["cases"])) == (0, [failing], 8)


def test_a_case_that_costs_the_device_is_recorded_before_the_run_ends(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(model_suite, "free", lose)
        with pytest.raises(SystemExit, match="the device is lost after DLRM bottom MLP forward batch 32 bf16: Runtime"):
            run(tmp_path / "run")
    assert len(run(tmp_path / "run")[1]["cases"]) == len(runs.titles) == 18


def test_the_time_limit_leaves_cases_for_the_next_run(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, results = run(tmp_path / "run", "--time-limit", "0", "--filter", "bottom")
    assert (status, results["cases"], len(results["left_out"])) == (0, [], 9)
    assert "Cases left out by the time limit: DLRM bottom MLP forward" in capsys.readouterr().out
    assert len(run(tmp_path / "run", "--filter", "bottom")[1]["left_out"]) == 0
    assert len(runs.titles) == 9


def test_merged_shards_are_the_whole_run(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, whole = run(tmp_path / "whole")
    runs.failing = {"DLRM bottom MLP forward batch 32 bf16"}
    for index in (1, 2, 3):
        run(tmp_path / f"part{index}", "--shard", f"{index}/3")
    runs.failing = set()
    run(tmp_path / "again", "--filter", "bottom", "--filter", "batch 32 bf16")
    files = [str(tmp_path / f"{name}.json") for name in ("part1", "part2", "part3", "again")]
    capsys.readouterr()
    assert main(["merge", *files, "--output", str(tmp_path / "merged")]) == 0
    merged = json.loads((tmp_path / "merged.json").read_text())
    untimed = [[{**case, "seconds": 0} for case in results["cases"]] for results in (merged, whole)]
    assert untimed[0] == untimed[1]
    assert (merged["lines"], merged["fusion"]) == (whole["lines"], whole["fusion"])
    assert "Cases: 18 of 106." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("machine", "commit", "f" * 40, f"commit is {COMMIT} in one and {'f' * 40} in the other"),
        ("machine", "device", "another card", "device is NVIDIA H200 in one and another card in the other"),
        ("machine", "torch", "2.8.0", "torch is"),
        ("settings", "transformers", "4.0", "transformers is 5.23.0 in one and 4.0 in the other"),
        ("settings", "quick", True, "quick is False in one and True in the other"),
    ],
)
def test_merge_refuses_runs_that_differ(part: str, name: str, value: Any, message: str, tmp_path: Path) -> None:
    one, other = results_of(full_cases()[:3]), results_of(full_cases()[3:5])
    other[part][name] = value
    for file, results in (("one", one), ("other", other)):
        report.save(results, tmp_path / f"{file}.json")
    with pytest.raises(SystemExit, match=f"cannot merge: {message}"):
        main(["merge", str(tmp_path / "one.json"), str(tmp_path / "other.json")])


def test_merge_refuses_other_suites_and_changed_code() -> None:
    one = results_of(full_cases()[:3])
    with pytest.raises(ValueError, match="the suites are models and host"):
        model_files.merged([one, {**one, "suite": "host"}])
    changed = {**one, "machine": {**one["machine"], "commit": f"{COMMIT} with changes"}}
    with pytest.raises(ValueError, match="with changes, so that the code may differ"):
        model_files.merged([changed, changed])


def test_tables_show_verdicts_times_errors_and_fusion() -> None:
    cases = full_cases()
    cases[0]["contenders"]["cutfuse"] = {"note": "failed: RuntimeError: no kernel"}
    lines = model_report.markdown(results_of(cases)).splitlines()
    graphs = "| 2 | forward, bf16 | GPU time | cutfuse, CUDA graphs | faster of eager and torch.compile, CUDA graphs"
    assert f"{graphs} | 24 of 24: geometric mean | 0.400 | met (≤ 0.93) |" in lines
    rest = "cutfuse | faster of eager and torch.compile | 23 of 24"
    assert any(line.startswith(f"| 1 | forward, bf16 | GPU time | {rest}") for line in lines)
    assert any(line.endswith("| 0.400 | met (≤ 1.1, or 1 s more) |") for line in lines)
    bert = "| BERT-large | forward | 32 | bf16 | 5.00 / 5.20 | 5.00 / 5.20 | 5.00 / 5.20 | 2.00 / 2.08 | 2.00 / 2.08 | "
    assert f"{bert}0.400 / 0.400 | 0.400 / 0.400 | 12 of 24 |" in lines
    assert "| BERT-large | 20.0 s | 8.0 s | 2 | 2 |" in lines
    errors = "| BERT-large | bf16 | 2.0e-03 | 2.0e-03 | 8.0e-04 | 0.400 | 4.0e-03 | 4.0e-03 | 1.6e-03 | 0.400 |"
    assert errors in lines
    fused = "| ViT-B/16 | 12 x blocks.*.mlp.fc1 3072x768 | yes | gelu(z) | linear | a product begins | all |"
    assert fused in lines
    assert any("| no | - | reshape | nothing follows the product | all |" in line for line in lines)
    assert "- cutfuse failed: RuntimeError: no kernel (DLRM bottom MLP forward batch 2048 bf16)." in lines
    assert "- Cases: 106 of 106." in lines
    without = model_report.markdown(results_of(cases), ("over", "program"))
    assert "| over |" not in without
    assert "| program |" not in without


def test_a_line_of_which_cases_are_missing_is_incomplete() -> None:
    cases = full_cases()
    key = ("Swin-B", "forward", "batch 128", "bf16")
    lines = model_report.markdown(results_of([case for case in cases if key_of(case) != key])).splitlines()
    assert sum(line.endswith("| incomplete, 23 of 24 (≤ 0.93) |") for line in lines) == 4
    assert sum(line.endswith("| incomplete, 23 of 24 (≤ 1.01) |") for line in lines) == 4
    assert "- Targets: 14 met, 0 missed, 8 incomplete, 0 not measured." in lines
    nothing = model_report.markdown(results_of([])).splitlines()
    assert "- Targets: 0 met, 0 missed, 0 incomplete, 22 not measured." in nothing


def test_small_models_and_missing_packages_are_told() -> None:
    results = results_of(full_cases(True), quick=True)
    results["settings"]["timm"] = None
    text = model_report.summary(results)
    assert "- No verdict: the targets are those of the whole models." in text
    assert "- A run of small models" in text
    assert "- timm is not installed, so these models are left out: ViT-B/16" in text
    assert "- transformers is not installed" not in text


def test_a_summary_gives_the_same_tables_and_may_be_committed(tmp_path: Path) -> None:
    results = results_of(full_cases())
    summarise(results, tmp_path / "summary.json")
    assert model_report.markdown(report.load(tmp_path / "summary.json")) == model_report.markdown(results)


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_the_plot_has_the_lines_and_a_panel_for_each_pass_and_batch(tmp_path: Path) -> None:
    from bench import model_plot

    results = results_of(full_cases())
    titles = [title for title, _ in model_plot.panels_of(results)]
    assert titles == [
        f"{kind}, {precision}, {load} batch"
        for kind, load in (("forward", "small"), ("forward", "full"), ("training", "full"))
        for precision in ("bf16", "fp32")
    ]
    assert model_plot.label_of(results["lines"][4]) == "2  forward, bf16, CUDA graphs, GPU time, geometric mean"
    assert model_plot.write_png(results, tmp_path / "models.png")
    assert not model_plot.write_png(results_of([]), tmp_path / "none.png")


def test_quick_runs_and_shards_are_kept_apart() -> None:
    assert default_output(parse(["models"]), "NVIDIA H200") == RAW / "models-nvidia-h200"
    assert default_output(parse(["models", "--quick"]), "NVIDIA H200") == RAW / "models-nvidia-h200-partial"
    shard = parse(["models", "--shard", "2/4"])
    assert default_output(shard, "NVIDIA H200") == RAW / "models-nvidia-h200-shard-2-4"
    assert default_output(parse(["host"]), "NVIDIA H200") == RAW / "host-nvidia-h200"
