"""Runs of the benchmark on the CPU, and figures as a run would give them, for the tests of `bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import machine, results, timing
from bench.__main__ import main
from bench.goals import TARGET_DEVICE
from bench.runner import figures_of
from bench.suite import Case, Figures, Results, Session, suite_of
from bench.timing import Effort

CPU = torch.device("cpu")
COMMIT = "0123456789abcdef" * 2 + "01234567"


def run(suite: str, output: Path, *arguments: str, commit: str = COMMIT) -> tuple[int, Results]:
    """Run a suite on the CPU with two rounds; the exit status and what it wrote."""
    command = [suite, "--device", "cpu", "--rounds", "2", "--commit", commit, "--output", str(output)]
    return main([*command, *arguments]), json.loads(output.with_suffix(".json").read_text())


def session_of(*contenders: str, effort: Effort | None = None) -> Session:
    """A session on the CPU."""
    return Session(CPU, contenders, effort or Effort(0.0, 2, 2))


def measured(case: Case, *contenders: str) -> Figures:
    """What a case gives for contenders."""
    return figures_of(case, session_of(*contenders))


def parts_of(case: Case) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """What builds the workload of a case of launches, and its contenders."""
    own = case.prepare.__self__  # type: ignore[attr-defined]
    return own.build, own.contenders


def results_of(suite: str, cases: list[Figures], device: str = TARGET_DEVICE, **settings: Any) -> Results:
    """A results file's content."""
    found = suite_of(suite)
    own = {"small": False, "quick": False, "seed": 0, "contenders": list(found.contenders), **settings}
    facts = {**machine.facts(CPU, COMMIT), "device": device}
    content = {"schema": results.SCHEMA, "suite": suite, "machine": facts, "settings": own}
    return {**content, "cases": cases, "left_out": [], **found.derived({"cases": cases})}


class LaunchClock:
    """Gives each launch's own number as the device's time."""

    def start(self, launch: timing.Launch, backlog_us: float) -> timing.Queued:
        assert backlog_us >= 30
        elapsed = float(str(launch()))
        return timing.Queued(lambda: elapsed)

    def wait(self) -> None:
        pass
