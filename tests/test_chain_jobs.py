"""The chains suite in several processes: every case is timed once, whatever becomes of one of the processes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import chain_jobs
from bench.__main__ import main
from bench.chain_cases import Case, all_cases
from bench.chain_contenders import AUTOTUNE, EAGER
from bench.chain_jobs import Share, run_jobs, shares_of
from bench.chain_run import Options
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
    results = {"settings": {"small": False, "quick": False, "seed": 0}}
    shares = shares_of(cases, results, 12)
    assert sorted(key for share in shares for key in share.keys) == sorted(key_of(case.as_dict()) for case in cases)
    counts = [sum(AUTOTUNE in case.contenders for case in share.cases()) for share in shares]
    assert sum(counts) == 24
    assert max(counts) == min(counts) == 2
    assert len(shares_of(cases[:3], results, 12)) == 3


def exit_at(place: int, original: Any) -> Any:
    """A `prepare` or `timed` that ends its process with the `place`-th case."""
    calls: list[int] = []

    def ending(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == place:
            os._exit(3)
        return original(*arguments)

    return ending


def work_that_ends(share: Share, options: Options, link: Any) -> None:
    """The process with the first case ends while it prepares its second one."""
    if share.keys[0] == key_of(some_cases(1)[0].as_dict()):
        chain_jobs.prepare = exit_at(2, chain_jobs.prepare)
    chain_jobs.work(share, options, link)


def work_that_ends_in_its_turn(share: Share, options: Options, link: Any) -> None:
    """The process with the first case ends while it times its second one."""
    if share.keys[0] == key_of(some_cases(1)[0].as_dict()):
        chain_jobs.timed = exit_at(2, chain_jobs.timed)
    chain_jobs.work(share, options, link)


def work_that_fails(share: Share, options: Options, link: Any) -> None:
    """No case can be built."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    chain_jobs.prepare = fail
    chain_jobs.work(share, options, link)


@pytest.mark.parametrize(("ending", "timed"), [(work_that_ends, 2), (work_that_ends_in_its_turn, 3)])
def test_a_process_that_ends_leaves_out_its_cases_alone(
    monkeypatch: pytest.MonkeyPatch, ending: Any, timed: int
) -> None:
    monkeypatch.setattr(chain_jobs, "work", ending)
    cases = some_cases(4)
    found, left_out = run(cases)
    assert len(found) == timed
    assert sorted([*left_out, *(" ".join(key_of(case)) for case in found)]) == sorted(case.title for case in cases)


def test_a_case_that_cannot_be_built_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_jobs, "work", work_that_fails)
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


def test_processes_do_not_count_where_cases_are_fewer() -> None:
    assert len(shares_of(some_cases(2), RESULTS, 8)) == 2
    assert replace(shares_of(some_cases(2), RESULTS, 1)[0], compile_threads=1).cases() == some_cases(2)
