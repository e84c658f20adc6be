"""The chains suite in several processes: every case is timed once, whatever becomes of one of the processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import chain_jobs
from bench.__main__ import main
from bench.case_loop import Figures
from bench.chain_cases import Case, all_cases
from bench.chain_contenders import AUTOTUNE, EAGER
from bench.chain_jobs import ChainWorker, run_jobs, shares_of
from bench.chain_run import Options, Prepared
from bench.jobs import Turn
from bench.progress import Progress
from bench.run_files import key_of
from bench.timing import Effort

CPU = torch.device("cpu")
OPTIONS = Options(CPU, (EAGER,), Effort(0.0, 2, 2), None)
RESULTS: dict[str, Any] = {"settings": {"small": True, "quick": False, "seed": 0}}


def some_cases(count: int) -> list[Case]:
    """The first small cases without a start of processes."""
    return list(all_cases(True, False, 0))[:count]


def run(cases: list[Case], limit_s: float = 120.0) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures of cases in two processes, and the titles of those left out."""
    found: list[dict[str, Any]] = []
    left_out = run_jobs(cases, 2, RESULTS, OPTIONS, limit_s, Progress(len(cases)), found.append, lambda _: "")
    return found, left_out


def test_every_case_is_timed_once(tmp_path: Path) -> None:
    output = tmp_path / "run"
    arguments = ["--device", "cpu", "--rounds", "2", "--filter", "pointwise", "--output", str(output)]
    assert main(["chains", "--jobs", "2", *arguments]) == 0
    results = json.loads(output.with_suffix(".json").read_text())
    cases = [case for case in all_cases(True, False, 0) if "pointwise" in case.title]
    assert [key_of(case) for case in results["cases"]] == [key_of(case.as_dict()) for case in cases]
    for case in results["cases"]:
        assert set(case["contenders"]) == {"eager", "interpreted", "specialized"}
        assert all(entry["median_us"] > 0 for entry in case["contenders"].values())
    assert results["left_out"] == []


def test_the_shares_are_all_cases_and_spread_max_autotune() -> None:
    cases = [case for case in all_cases(False, False, 0) if case.build]
    shares = shares_of(cases, 12)
    assert sorted(case.title for share in shares for case in share) == sorted(case.title for case in cases)
    counts = [sum(AUTOTUNE in case.contenders for case in share) for share in shares]
    assert sum(counts) == 24
    assert max(counts) == min(counts) == 2
    assert len(shares_of(cases[:3], 12)) == 3


class Ends(ChainWorker):
    """The process with the first case ends at its second one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.titles: list[str] = []

    def end_at_second(self, case: Case) -> None:
        """End the process where it is the one, and has come so far."""
        self.titles.append(case.title)
        if len(self.titles) == 2 and self.titles[0] == some_cases(1)[0].title:
            os._exit(3)


class EndsWhilePreparing(Ends):
    """It ends while it prepares that case."""

    def prepare(self, case: Case) -> Turn | Figures:
        self.end_at_second(case)
        return super().prepare(case)


class EndsInItsTurn(Ends):
    """It ends while it times that case."""

    def time(self, prepared: Prepared) -> Figures:
        self.end_at_second(prepared.case)
        return super().time(prepared)


class Fails(ChainWorker):
    """No case can be built."""

    def prepare(self, case: Case) -> Turn | Figures:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize(("ending", "timed"), [(EndsWhilePreparing, 2), (EndsInItsTurn, 3)])
def test_a_process_that_ends_leaves_out_its_cases_alone(
    monkeypatch: pytest.MonkeyPatch, ending: type[ChainWorker], timed: int
) -> None:
    monkeypatch.setattr(chain_jobs, "ChainWorker", ending)
    cases = some_cases(4)
    found, left_out = run(cases)
    assert len(found) == timed
    assert sorted([*left_out, *(" ".join(key_of(case)) for case in found)]) == sorted(case.title for case in cases)


def test_a_case_that_cannot_be_built_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_jobs, "ChainWorker", Fails)
    found, left_out = run(some_cases(3))
    assert {case["note"] for case in found} == {"failed: RuntimeError: out of memory"}
    assert len(found) == 3
    assert left_out == []


def test_the_time_limit_leaves_cases_out() -> None:
    before = time.monotonic()
    found, left_out = run(some_cases(3), limit_s=0.0)
    assert not found
    assert len(left_out) == 3
    assert time.monotonic() - before < 60
