"""Figures of the fp32 suite as a run would give them, for the tests of its verdicts, tables and plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import fp32_cases as suite
from bench.cases import Case

FUSED, CUBLAS = "fused: sm90_planes", "unfused: cuBLAS: torch.mm"

Figures = dict[str, Any]


def figures(case: Case, times: dict[str, float], path: str = FUSED) -> Figures:
    """A case's figures with these medians; contenders without one take 100 us."""
    names = case.contenders or ()
    entries: dict[str, Figures] = {
        name: {"median_us": times.get(name, 100.0), "p10_us": 1.0, "p90_us": 2.0, "error": 1e-7, "path": path}
        for name in names
    }
    return {
        **{key: getattr(case, key) for key in ("group", "variant", "shape", "precision")},
        "floor_us": None,
        "path": path,
        "contenders": entries,
        "ratios": {},
        "targets": [],
        "accurate": None,
    }


def full_cases(change: Callable[[Case], tuple[dict[str, float], str]] | None = None) -> list[Figures]:
    """Every case of the full suite, cutfuse five times as fast as everything else; `change` gives times and path."""
    quick = {suite.PLAIN: 20.0, suite.KEPT: 20.0}
    found = []
    for case in suite.fp32_cases(small=False, quick=False):
        times, path = change(case) if change else ({}, FUSED)
        found.append(figures(case, {**quick, **times}, path))
    return found


def changed(group: str, shape: str, times: dict[str, float], path: str = FUSED) -> list[Figures]:
    """The full suite with one case's times and path changed."""
    return full_cases(lambda case: (times, path) if (case.group, case.shape) == (group, shape) else ({}, FUSED))
