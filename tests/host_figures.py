"""Figures of the host suite as a run would give them, for the tests of its verdicts, tables and plot."""

from __future__ import annotations

from typing import Any

import torch

from bench import host_cases as suite
from bench import host_suite, machine, report
from bench.cases import TARGET_DEVICE
from bench.host_suite import CUTFUSE, PYTORCH

Figures = dict[str, Any]
HALF = 0.5  # cutfuse's time over PyTorch's, unless a test says otherwise: less than every target


def contenders(ratio: float) -> Figures:
    """PyTorch at 40 us, cutfuse at `ratio` times as much."""
    times = {PYTORCH: 40.0, CUTFUSE: 40.0 * ratio}
    return {name: {"median_us": time, "p10_us": 0.9 * time, "p90_us": 1.123456 * time} for name, time in times.items()}


def full_cases(quick: bool = False, **ratios: float) -> list[Figures]:
    """Every case of the suite; `ratios` are of the titles that hold the keyword's words, "_" for a space."""
    found = []
    for case in suite.host_cases(small=False, quick=quick):
        own = [ratio for words, ratio in ratios.items() if words.replace("_", " ") in case.title]
        found.append({**case.as_dict(), "rounds": 300, "contenders": contenders(own[0] if own else HALF)})
    return found


def results_of(cases: list[Figures], device: str = TARGET_DEVICE, quick: bool = False) -> Figures:
    """A results file's content."""
    effort = host_suite.effort_of(quick, None)
    return {
        "schema": report.SCHEMA,
        "suite": "host",
        "machine": {**machine.facts(torch.device("cpu"), "0" * 40), "device": device},
        "settings": host_suite.settings(quick, [], 0, effort, 240.0),
        "lines": host_suite.judge(cases, device, quick),
        "cases": cases,
        "left_out": [],
        "seconds": 100.0,
    }
