"""The models suite in several processes: waves, and that a case runs once, whatever becomes of another."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_figures import full_cases, results_of
from torch._inductor import config as inductor_config

from bench import model_jobs, model_report
from bench.__main__ import main
from bench.case_loop import Figures
from bench.device_turns import DeviceTurns
from bench.jobs import Turn
from bench.model_cases import ERRORS, FULL_BATCH, PASSES, Case, all_cases, key_of, weight_of
from bench.model_contenders import COMPILE, CONTENDERS, CUTFUSE, EAGER
from bench.model_jobs import ModelWorker, run_jobs, waves_of
from bench.model_run import Options, Prepared
from bench.model_zoo import TRAINING
from bench.progress import Progress
from bench.timing import Effort

OPTIONS = Options(torch.device("cpu"), (EAGER,), Effort(0.0, 2, 2))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both compilers are Dynamo with PyTorch's operations."""
    for contender in (COMPILE, CUTFUSE):
        monkeypatch.setitem(CONTENDERS, contender.name, replace(contender, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def small_cases(*kinds: str) -> list[Case]:
    """The MLPs' small cases of some kinds."""
    return [case for case in all_cases(True) if case.model.name.startswith("DLRM") and case.kind in kinds]


def run(cases: list[Case], limit_s: float = 120.0) -> tuple[list[Figures], list[str]]:
    """The figures of cases in two processes, and the titles of those left out."""
    found: list[Figures] = []
    left_out = run_jobs(cases, 2, True, OPTIONS, limit_s, Progress(len(cases)), found.append, lambda _: "")
    return found, left_out


def timed_cases() -> list[Case]:
    """Those that run in waves, of whole models."""
    return [case for case in all_cases(False) if case.kind in PASSES]


@pytest.mark.parametrize("jobs", [1, 2, 8, 12, 16, 100])
def test_waves_are_all_cases_and_hold_one_for_each_process(jobs: int) -> None:
    waves = waves_of(timed_cases(), jobs)
    assert len(waves) == -(-len(timed_cases()) // jobs)
    assert sorted(case.title for wave in waves for case in wave) == sorted(case.title for case in timed_cases())
    assert all(0 < len(wave) <= jobs for wave in waves)


@pytest.mark.parametrize("jobs", [8, 12, 16])
def test_waves_are_about_as_heavy(jobs: int) -> None:
    waves = waves_of(timed_cases(), jobs)
    weights = [sum(map(weight_of, wave)) for wave in waves]
    assert max(weights) < 1.25 * min(weights)
    trained = [sum(case.kind == TRAINING for case in wave) for wave in waves]
    assert max(trained) < sum(trained) / 2
    full_llamas = [
        sum(case.model.name == "Llama 1B" and case.load == FULL_BATCH and case.precision == "fp32" for case in wave)
        for wave in waves
    ]
    assert max(full_llamas) == 1


def test_without_cases_there_is_no_wave() -> None:
    assert waves_of([], 12) == []


@pytest.mark.usefixtures("stand_ins")
def test_two_processes_give_the_cases_of_one(tmp_path: Path) -> None:
    output = tmp_path / "run"
    arguments = ["--device", "cpu", "--rounds", "2", "--filter", "bottom", "--output", str(output)]
    assert main(["models", "--jobs", "2", *arguments]) == 0
    results = json.loads(output.with_suffix(".json").read_text())
    cases = [case for case in all_cases(True) if "bottom" in case.title]
    assert [key_of(case) for case in results["cases"]] == [key_of(case.as_dict()) for case in cases]
    assert results["settings"]["jobs"] == 2
    assert results["left_out"] == []
    for case in results["cases"]:
        names = {"compile", "cutfuse"} if case["variant"] == "compilation" else {"eager", "compile", "cutfuse"}
        assert set(case["contenders"]) == names
        figure = {"compilation": "cold_s", "errors": "error"}.get(case["variant"], "gpu_us")
        assert all(entry[figure] > 0 for entry in case["contenders"].values())
        assert case["seconds"] > 0
    assert [case.get("jobs") for case in results["cases"] if case["variant"] == "compilation"] == [2]
    assert "while at most one other process compiled" in model_report.summary(results)


def test_compile_times_beside_other_processes_are_told() -> None:
    cases = full_cases()
    assert "Compile times were" not in model_report.summary(results_of(cases))
    for case in cases:
        if case["variant"] == "compilation":
            case["jobs"] = 12
    assert "while up to 11 other processes compiled" in model_report.summary(results_of(cases))


class EndsInItsTurn(ModelWorker):
    """The process ends while it times a training step of fp32."""

    def time(self, prepared: Prepared) -> Figures:
        if (prepared.case.kind, prepared.case.precision) == (TRAINING, "fp32"):
            os._exit(3)
        return super().time(prepared)


class LosesItsDevice(ModelWorker):
    """The process loses its device in a training step of fp32."""

    is_lost = False

    def prepare(self, case: Case) -> Turn | Figures:
        self.is_lost = (case.kind, case.precision) == (TRAINING, "fp32")
        return super().prepare(case)

    def make_room(self, is_idle: bool) -> None:
        if self.is_lost and is_idle:
            raise SystemExit(4)  # Without the traceback of the RuntimeError that CUDA raises.
        super().make_room(is_idle)


class Fails(ModelWorker):
    """No case of errors can be built, and no other one timed."""

    def prepare(self, case: Case) -> Turn | Figures:
        if case.kind == ERRORS:
            raise MemoryError("out of memory")
        return super().prepare(case)

    def time(self, prepared: Prepared) -> Figures:
        raise MemoryError("lost")


class NeverPrepares(ModelWorker):
    """Timed cases take longer than the run."""

    def prepare(self, case: Case) -> Turn | Figures:
        if case.kind in PASSES:
            time.sleep(60)
        return super().prepare(case)


def test_a_process_that_ends_loses_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_jobs, "ModelWorker", EndsInItsTurn)
    found, left_out = run(small_cases(TRAINING)[:2])
    assert left_out == []
    assert len(found) == len({key_of(case) for case in found}) == 2
    notes = {case["precision"]: case.get("note") for case in found}
    assert notes == {"bf16": None, "fp32": "failed: RuntimeError: the process ended with status 3"}


def test_a_case_that_costs_the_device_keeps_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_jobs, "ModelWorker", LosesItsDevice)
    found, left_out = run(small_cases(TRAINING)[:2])
    assert left_out == []
    assert len(found) == 2
    assert all(case["contenders"]["eager"]["gpu_us"] > 0 for case in found)


def test_a_case_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_jobs, "ModelWorker", Fails)
    found, left_out = run([case for kind in (ERRORS, TRAINING) for case in small_cases(kind)[:2]])
    assert left_out == []
    notes = sorted(case["note"] for case in found)
    assert notes == [*["failed: MemoryError: lost"] * 2, *["failed: MemoryError: out of memory"] * 2]


def test_the_time_limit_leaves_cases_out() -> None:
    before = time.monotonic()
    found, left_out = run(small_cases(TRAINING), limit_s=0.0)
    assert not found
    assert len(left_out) == 4
    assert time.monotonic() - before < 5


def test_cases_that_are_being_prepared_at_the_time_limit_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_jobs, "ModelWorker", NeverPrepares)
    monkeypatch.setattr("bench.jobs.JOIN_S", 0.5)
    before = time.monotonic()
    found, left_out = run(small_cases(TRAINING), limit_s=8.0)
    assert not found
    assert len(left_out) == 4
    assert time.monotonic() - before < 20


def test_processes_share_the_processors_that_the_run_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four runs on one machine take a quarter of it each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 48)
    with inductor_config.patch(compile_threads=0):
        ModelWorker(True, 6, OPTIONS, DeviceTurns(Path(os.devnull)))
        assert inductor_config.compile_threads == 2
