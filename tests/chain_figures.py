"""Figures of the chains suite as a run would give them, for the tests of its verdicts, tables and plot."""

from __future__ import annotations

from typing import Any

import torch

from bench import chain_suite, machine, report
from bench.cases import TARGET_DEVICE
from bench.ceilings import ceilings_for
from bench.chain_cases import MEMORY, MODEL, NO_WORK, START, Case, all_cases
from bench.chain_contenders import NAMES, SPECIALIZED
from bench.chain_memory import EAGER_STACK, FUSED_STACK, RECOMPUTED_STACK
from bench.chain_run import memory_us
from bench.chain_start import COLD, SECOND

Figures = dict[str, Any]
COMMIT = "0123456789abcdef" * 2 + "01234567"
# The specialized kernel's time, unless a test says otherwise: within every limit.
OWN_US = 400.0
OTHERS_US = {"mm": 390.0, "eager": 800.0, "compile": 500.0, "max-autotune": 480.0, "interpreted": 700.0}
BOUNDS_US = {"pointwise": 100.0, "product": 395.0}
# Kept, and the peak.
STEP_BYTES = {EAGER_STACK: (1000, 1200), FUSED_STACK: (1000, 1200), RECOMPUTED_STACK: (600, 900)}
WAITS_S = {COLD: 0.3, SECOND: 0.01}


def timing(us: float) -> Figures:
    """A contender's entry."""
    own = {"median_us": us, "p10_us": 0.97 * us, "p90_us": 1.0312345 * us}
    return {**own, "host_us": 41.2345, "rounds": 100, "error": 1.2345e-3, "rounding": 1.95e-3}


def contenders(case: Case) -> Figures:
    """Entries of all who run a case; what only moves data takes 1/0.97 of its least time."""
    if case.group == START:
        waits = {COLD: 3.0} if case.variant == MODEL else WAITS_S
        return {name: {"wait_s": wait, "kernels": 30} for name, wait in waits.items()}
    if case.group == MEMORY:
        return {name: dict(zip(("kept_bytes", "peak_bytes"), own, strict=True)) for name, own in STEP_BYTES.items()}
    least = memory_us(case, ceilings_for(TARGET_DEVICE)) or 0.0
    own = least / 0.97 if case.work.written_bytes else OWN_US
    times = {**OTHERS_US, **BOUNDS_US, SPECIALIZED: own}
    return {name: timing(times[name]) for name in case.contenders}


def figures_of(case: Case) -> Figures:
    """A case's figures."""
    figures = {**case.as_dict(), "contenders": contenders(case), "seconds": 4.5}
    if case.work != NO_WORK:
        figures["memory_us"] = memory_us(case, ceilings_for(TARGET_DEVICE))
    return figures


def full_cases(seed: int = 0) -> list[Figures]:
    """Every case of the suite."""
    return [figures_of(case) for case in all_cases(False, False, seed)]


def results_of(cases: list[Figures], device: str = TARGET_DEVICE, quick: bool = False) -> Figures:
    """A results file's content."""
    effort = chain_suite.effort_of(quick, None)
    results: Figures = {
        "schema": report.SCHEMA,
        "suite": "chains",
        "machine": {**machine.facts(torch.device("cpu"), COMMIT), "device": device},
        "settings": chain_suite.settings(False, quick, NAMES, effort, 0),
        "lines": [],
        "chains": [],
        "cases": cases,
        "left_out": [],
        "seconds": 100.0,
    }
    chain_suite.complete(results)
    return results
