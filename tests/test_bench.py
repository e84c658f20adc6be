"""Every suite of the benchmark on the CPU: measured, reported, drawn, continued, divided and merged."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import COMMIT, measured, run, session_of

import cutfuse
from bench import SUITES, chain_suite, goals, launches, machine, reference, results, runner, tables
from bench.__main__ import RAW, default_words, main, parse, results_path
from bench.goals import TARGET_DEVICE
from bench.launches import CONTENDERS
from bench.suite import Case, Session, shard_of, suite_of, title_of
from bench.workloads import Run, Workload, ceilings_for, floor_us, note_wrong

pytestmark = pytest.mark.usefixtures("one_thread")
# Of each suite but the models, whose test stands in for the compilers: a few cases, and their contenders.
SMALL_RUNS = {
    "reference": (["bf16"], {"mm", "eager", "cutfuse"}, 5),
    "fp32": (["64x64"], {"mm", "eager", "cutfuse", "cutfuse-kept"}, 6),
    "chains": (["8x24x16", "bf16"], {"mm", "eager", "interpreted", "specialized"}, 7),
    "accuracy": (["x64 "], {"cuBLAS fp32", "guarded", "split3", "split6", "tf32", "bf16"}, 15),
    "host": (["pointwise of three"], {"pytorch", "cutfuse"}, 4),
    "random": ([], {"pytorch", "cutfuse"}, 105),  # each chain in each group, and new ones
    "head": (["plain"], {"eager", "chunked", "cutfuse", "cutfuse-large"}, 2),
    "mlp": (["gelu"], {"eager", "cutfuse"}, 4),
    "bits": (["gelu", "bf16"], {"default", "eager rounding", "PyTorch"}, 5),
}
ONE = ("--filter", "Sigmoid 256", "--filter", "fp32")


@pytest.mark.parametrize("suite", SMALL_RUNS)
def test_suite_measures_reports_and_draws(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filters, names, count = SMALL_RUNS[suite]
    status, found = run(suite, tmp_path / "run", *(f"--filter={text}" for text in filters))
    assert (status, len(found["cases"])) == (0, count)
    assert {name for case in found["cases"] for name in case["contenders"]} == names
    for entry in (entry for case in found["cases"] for entry in case["contenders"].values()):
        assert "frobenius" in entry or 0 < entry["p10_us"] <= entry["median_us"] <= entry["p90_us"]
        assert entry.get("error", 0.0) < 1e-2
        assert entry.get("rounds", 2) == 2
    assert found["machine"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert f"{suite} on " in printed
    assert f"No verdict: the targets are those of an {TARGET_DEVICE}." in printed
    path = tmp_path / "run.json"
    assert main(["report", str(path), "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert all(table.markdown() in printed for table in goals.tables_of(results.load(path)) if table.rows)
    assert main(["summarise", str(path), "--output", str(tmp_path / "results")]) == 0
    summary = results.load(tmp_path / "results" / "run.json")
    assert goals.as_markdown(summary, is_short=True) == goals.as_markdown(results.load(path), is_short=True)
    assert (tmp_path / "results" / "run.json").stat().st_size < path.stat().st_size


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("kind", [(False, False), (True, False), (False, True)])
def test_cases_have_titles_of_their_own(suite: str, kind: tuple[bool, bool]) -> None:
    titles = [case.title for case in suite_of(suite).cases(*kind, 0)]
    assert titles
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("suite", ["chains", "random", "head", "mlp", "fit", "bits"])
def test_what_is_drawn_depends_on_the_seed_alone(suite: str) -> None:
    def titles(seed: int) -> list[str]:
        return [case.title for case in suite_of(suite).cases(False, False, seed)]

    first = titles(0)
    chain_suite.all_cases.cache_clear()
    assert titles(0) == first
    assert len(set(titles(1)) - set(first)) > 7
    assert suite not in ("random", "fit") or not set(titles(1)) & set(first)


@pytest.mark.parametrize("content", ["{}", "[1]", "not JSON"])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(content)
    for command in ("report", "merge", "summarise"):
        with pytest.raises(SystemExit, match=f"cannot {command}"):
            main([command, str(other)])


def test_partial_runs_and_shards_are_kept_apart() -> None:
    def path(*arguments: str) -> str:
        return str(results_path(None, *default_words(parse(["host", *arguments]), TARGET_DEVICE)))

    assert path() == str(RAW / "host-nvidia-h200.json")
    assert path("--quick") == path("--filter", "x") == str(RAW / "host-nvidia-h200-partial.json")
    assert path("--shard", "2/4") == str(RAW / "host-nvidia-h200-shard-2-4.json")
    assert results_path(Path("h200-2.11"), "host").name == "h200-2.11.json"


def test_tables_without_rich_are_markdown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    tables.show([tables.Table("A title", {"what": ["a|b", "c"], "us": ["1.5", "-"]})], ["a remark"])
    lines = ["**A title**", "", "| what | us |", "|---|---:|", "| a\\|b | 1.5 |", "| c | - |", "", "- a remark"]
    assert capsys.readouterr().out.splitlines() == lines


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch, prepare: Any) -> None:
    """Put another contender in the place of one."""
    monkeypatch.setitem(CONTENDERS, name, replace(CONTENDERS[name], prepare=prepare))


def test_a_wrong_result_is_not_timed_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CONTENDERS["cutfuse"].prepare

    def prepare(workload: Any) -> Run:
        own = right(workload)
        assert own is not None
        return Run(lambda: own.launch() * 1.5, own.exact)

    stand_in("cutfuse", monkeypatch, prepare)
    status, found = run("reference", tmp_path / "run", *ONE)
    entry = found["cases"][0]["contenders"]["cutfuse"]
    assert status == 1
    assert entry["note"].startswith("wrong: relative error 5.0e-01")
    assert "median_us" not in entry
    assert "median_us" in found["cases"][0]["contenders"]["eager"]


@pytest.mark.parametrize(
    ("results", "note", "errors"),
    [
        ((torch.ones(4), 1e-6 * torch.ones(2)), None, [0.0, 0.0]),
        ((torch.ones(4), torch.zeros(2)), "wrong: relative error 1.0e+00 against fp64", [0.0, 1.0]),
        ((torch.ones(4), torch.tensor([1e-6, torch.nan])), "wrong: relative error inf", [0.0, None]),
        ((torch.zeros(4), torch.ones(2)), "wrong: relative error 1.0e+06", [1.0, 1e6]),
        ((torch.ones(4), torch.zeros(3)), "failed: ValueError: the result has shape (3,)", None),
        (torch.ones(4), "failed: ValueError: the number of results is 1, and should be 2", None),
    ],
)
def test_each_of_several_results_is_compared(results: Any, note: str | None, errors: list[float] | None) -> None:
    exact = (torch.ones(4).double(), 1e-6 * torch.ones(2).double())
    workload = Workload((), lambda: results, lambda: results, exact)
    case = launches.launch_case(("a", "", "", "fp32"), lambda device: workload, ["cutfuse"])
    entry = measured(case, "cutfuse")["contenders"]["cutfuse"]
    assert entry.get("note", "").startswith(note or "")
    assert ("note" in entry, "median_us" in entry) == (note is not None, note is None)
    if errors is not None:
        found = [entry["error"], entry["gradient_error"]]
        assert found == pytest.approx([torch.inf if value is None else value for value in errors], rel=1e-3, abs=1e-6)


def test_a_failing_contender_leaves_the_others() -> None:
    checked: launches.Checked[str] = launches.Checked(session_of())

    def fail(entry: dict[str, Any]) -> str:
        entry["error"] = 0.5
        raise RuntimeError("no kernel")

    def be_wrong(entry: dict[str, Any]) -> str:
        note_wrong(entry, 0.5, "bf16")
        return "wrong"

    checked.add("failing", fail)
    checked.add("wrong", be_wrong)
    checked.add("without a call", lambda entry: None)
    checked.add("right", lambda entry: "right")
    assert checked.timed == {"right": "right"}
    assert checked.figures({"right": {"median_us": 2.0, "rounds": 4}})["contenders"] == {
        "failing": {"note": "failed: RuntimeError: no kernel"},
        "wrong": {"note": "wrong: relative error 5.0e-01 against fp64"},
        "right": {"median_us": 2.0, "rounds": 4},
    }


@pytest.mark.parametrize(
    ("suite", "filters", "name"),
    [("reference", ONE, "interleave"), ("host", ("--filter", "sum over", "--filter", "bf16"), "time_in_turns")],
)
def test_a_case_is_timed_in_its_suites_way_once_its_epilogues_are_compiled(
    suite: str, filters: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    measure = getattr(launches, name)

    def timed(*given: Any) -> Any:
        order.append("timed")
        return measure(*given)

    monkeypatch.setattr(launches, name, timed)
    monkeypatch.setattr("cutfuse.wait", lambda _: order.append("compiled"))
    _, found = run(suite, tmp_path / "run", *filters)
    assert order == ["compiled", "timed"] * len(found["cases"])


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown contenders fastest; choose from mm, eager"):
        main(["reference", "--device", "cpu", "--contenders", "eager,fastest"])
    with pytest.raises(SystemExit, match="no case of reference holds nothing like it"):
        main(["reference", "--device", "cpu", "--filter", "nothing like it"])
    for wrong in ("5/4", "0/4", "2", "a/b", "1/0"):
        with pytest.raises(SystemExit, match=f"a shard is written as 1/4 or 4/4, not {wrong}"):
            main(["reference", "--device", "cpu", "--shard", wrong])


def test_cases_are_listed_as_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chains", "--list", "--filter", "linear"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 117


class Measurements:
    """Stands for the measuring of cases: notes which are run, gives figures or fails, and may cost the device."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, case: Case, session: Session) -> dict[str, Any]:
        self.titles.append(case.title)
        entry = {"note": "failed: MemoryError"} if case.title in self.failing else {"median_us": 10.0, "error": 1e-7}
        return {**case.as_dict(), "contenders": {"eager": entry}}


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    """Cases take no time and have given figures."""
    fake = Measurements()
    monkeypatch.setattr(runner, "figures_of", fake)
    return fake


def all_titles() -> list[str]:
    """The reference suite's cases on a CPU."""
    return [case.title for case in suite_of("reference").cases(True, False, 0)]


def titles_of(found: dict[str, Any]) -> list[str]:
    """The cases of a results file."""
    return [title_of(case) for case in found["cases"]]


def test_a_run_that_was_cut_short_is_continued(
    measurements: Measurements, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("reference", tmp_path / "run", "--filter", "fp32")
    first = list(measurements.titles)
    _, found = run("reference", tmp_path / "run")
    assert "Continuing" in capsys.readouterr().out
    assert measurements.titles == [*first, *(title for title in all_titles() if title not in first)]
    assert titles_of(found) == all_titles()
    run("reference", tmp_path / "run", "--fresh", "--filter", "fp32")
    assert len(measurements.titles) == len(all_titles()) + len(first)


def test_only_a_run_of_the_same_code_and_kind_is_continued(measurements: Measurements, tmp_path: Path) -> None:
    run("reference", tmp_path / "run", "--filter", "fp32")
    for arguments, message in (
        (("--commit", "f" * 40), "commit is .* Give --fresh"),
        (("--seed", "1"), "seed is 0 in one and 1 in the other"),
        (("--contenders", "eager"), "contenders is"),
    ):
        with pytest.raises(SystemExit, match=rf"cannot continue .*: {message}"):
            run("reference", tmp_path / "run", *arguments)
    dirty = f"{COMMIT} with changes"
    run("reference", tmp_path / "dirty", "--filter", "fp32", commit=dirty)
    with pytest.raises(SystemExit, match="with changes, so that the code may differ"):
        run("reference", tmp_path / "dirty", commit=dirty)


def test_a_failing_case_may_be_tried_again(measurements: Measurements, tmp_path: Path) -> None:
    failing = all_titles()[0]
    measurements.failing = {failing}
    assert run("reference", tmp_path / "run", "--filter", "fp32")[0] == 1
    measurements.failing, measurements.titles = set(), []
    assert run("reference", tmp_path / "run", "--filter", "fp32")[0] == 1
    assert measurements.titles == []
    status, found = run("reference", tmp_path / "run", "--filter", "fp32", "--retry")
    assert (status, measurements.titles, len(found["cases"])) == (0, [failing], 5)


def test_a_case_that_costs_the_device_is_recorded_before_the_run_ends(
    measurements: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "release", lose)
        with pytest.raises(SystemExit, match=f"the device is lost after {all_titles()[0]}: Runtime"):
            run("reference", tmp_path / "run")
    assert titles_of(run("reference", tmp_path / "run")[1]) == all_titles() == measurements.titles


def test_the_time_limit_leaves_cases_for_the_next_run(
    measurements: Measurements, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run("reference", tmp_path / "run", "--time-limit", "0")
    assert (status, found["cases"], found["left_out"]) == (0, [], all_titles())
    assert "Cases left out by the time limit" in capsys.readouterr().out
    assert run("reference", tmp_path / "run")[1]["left_out"] == []


def test_time_is_held_back_by_what_cases_took() -> None:
    quick, slow = (Case("", name, "", "", lambda session: {}, seconds) for name, seconds in (("a", 2.0), ("b", 45.0)))
    budget = runner.Budget(100.0)
    assert budget.fits(slow)
    budget.note(quick, 6.0)  # three times as long as was guessed
    assert budget.fits(quick)
    assert not budget.fits(slow)


def test_merged_shards_are_the_whole_run(measurements: Measurements, tmp_path: Path) -> None:
    _, whole = run("reference", tmp_path / "whole")
    measurements.failing = {all_titles()[0]}
    for index in (1, 2, 3):
        run("reference", tmp_path / f"part{index}", "--shard", f"{index}/3")
    measurements.failing = set()
    run("reference", tmp_path / "again", "--filter", all_titles()[0])
    files = [str(tmp_path / f"{name}.json") for name in ("part3", "part1", "part2", "again")]
    assert main(["merge", *files, "--output", str(tmp_path / "merged")]) == 0
    merged = json.loads((tmp_path / "merged.json").read_text())
    untimed = [[{**case, "seconds": 0} for case in found["cases"]] for found in (merged, whole)]
    assert untimed[0] == untimed[1]
    results.save({**whole, "suite": "host"}, tmp_path / "host.json")
    with pytest.raises(SystemExit, match="cannot merge: the suites are reference and host"):
        main(["merge", str(tmp_path / "whole.json"), str(tmp_path / "host.json")])


def test_shards_divide_the_cases_and_take_about_as_long() -> None:
    cases = list(suite_of("models").cases(False, False, 0))
    for count in (2, 4):
        parts = [shard_of(cases, index, count) for index in range(1, count + 1)]
        assert sorted(case.title for part in parts for case in part) == sorted(case.title for case in cases)
        seconds = [sum(case.seconds for case in part) for part in parts]
        assert max(seconds) < 1.2 * min(seconds)
        assert parts[0] == [case for case in cases if case in parts[0]]


def test_two_processes_measure_the_cases_of_one(tmp_path: Path) -> None:
    status, found = run("reference", tmp_path / "run", "--jobs", "2", "--filter", "Sigmoid 256")
    assert (status, found["left_out"], found["settings"]["jobs"]) == (0, [], 2)
    assert titles_of(found) == [title for title in all_titles() if title.startswith("Sigmoid")]
    assert all(entry["median_us"] > 0 for case in found["cases"] for entry in case["contenders"].values())


ENDING = """
import os, runpy, sys
from bench import runner
measure = runner.figures_of
def figures_of(case, session):
    if "bf16" in case.title:
        os._exit(3)
    return measure(case, session)
runner.figures_of = figures_of
"""


def test_a_process_that_ends_loses_its_case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    status, found = run("reference", tmp_path / "run", "--jobs", "2", "--filter", "Sigmoid 256")
    notes = {case["precision"]: case.get("note") for case in found["cases"]}
    assert (status, found["left_out"]) == (1, [])
    assert notes == {"fp32": None, "bf16": "failed: the process ended with status 3", "fp16": None}


def test_a_file_that_is_written_holds_what_it_did_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, own = tmp_path / "run.json", {"schema": results.SCHEMA, "cases": [1]}
    results.save(own, path)
    write = Path.write_text

    def read_meanwhile(file: Path, text: str, **settings: Any) -> None:
        write(file, text[:5], **settings)
        assert results.load(path) == own
        write(file, text, **settings)

    monkeypatch.setattr(Path, "write_text", read_meanwhile)
    results.save({**own, "cases": [1, 2]}, path)
    assert results.load(path)["cases"] == [1, 2]


def test_packages_that_are_missing_leave_out_their_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "installed_version", lambda package: None)
    assert main(["models", "--list", "--filter", "TRAINING", "--filter", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "timm is not installed: cases that need it are left out."
    assert lines[2:] == ["DLRM bottom MLP training batch 65536 bf16", "DLRM top MLP training batch 65536 bf16"]


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
    (own,) = (found for found in reference.MODELS if found.name == model)
    floor = floor_us(own.least_work(False, precision), precision, ceilings_for(TARGET_DEVICE))
    assert floor == pytest.approx(microseconds, rel=0.01)


def test_reference_models_are_all_measured() -> None:
    assert {model.name for model in reference.MODELS} == set(cutfuse.models.__all__)


def test_a_case_that_cannot_be_built_is_noted() -> None:
    def fail(session: Session) -> Any:
        raise MemoryError("Tried to allocate 200 GiB")

    found = measured(Case("a", "", "1x1", "fp32", fail))
    assert found["note"] == "failed: MemoryError: Tried to allocate 200 GiB"
    assert results.has_failed(found)


def test_a_case_is_prepared_and_timed_in_its_precision_and_grad_mode() -> None:
    seen: list[tuple[bool, str, bool]] = []

    def measure() -> dict[str, Any]:
        seen.append((torch.is_grad_enabled(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return {"contenders": {}}

    def prepare(session: Session) -> Any:
        measure()
        return measure

    torch.set_float32_matmul_precision("medium")
    for precision, needs_grad in (("fp32", False), ("tf32", True)):
        found = measured(Case("a", "", "1x1", precision, prepare, needs_grad=needs_grad))
        assert "note" not in found
    assert (torch.get_float32_matmul_precision(), torch.is_grad_enabled()) == ("medium", True)
    assert seen == [(False, "highest", False)] * 2 + [(True, "high", False)] * 2
