"""What the fp32 suite is held to: how many times as fast as PyTorch's fp32 cutfuse is to be, and the verdicts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import fp32_cases as suite
from bench.cases import TARGET_DEVICE

# Where cutfuse runs cuBLAS itself, the two times are of one kernel and differ by noise.
NOISE = 0.98
MEAN, WORST = "geometric mean", "worst"


@dataclass(frozen=True)
class Goal:
    """A line of the table: the fastest of `rivals` takes `at_least` times as long as `contender` on the case `group`.

    `measure`: of the cells of a grid, their geometric mean or the worst; empty for a single case.
    """

    line: int
    group: str
    contender: str
    rivals: tuple[str, ...]
    at_least: float
    measure: str = ""


CUBLAS = (suite.CUBLAS,)
GOALS = (
    Goal(1, suite.RESIDUAL, suite.KEPT, suite.PYTORCH, 4.0),
    Goal(1, suite.RESIDUAL, suite.PLAIN, suite.PYTORCH, 4.0),
    Goal(2, suite.ROW_SUM, suite.KEPT, suite.PYTORCH, 4.0),
    Goal(3, suite.ROW_SUM, suite.PLAIN, suite.PYTORCH, 3.0),
    Goal(4, suite.PRODUCT, suite.PLAIN, CUBLAS, 3.5, MEAN),
    Goal(4, suite.PRODUCT, suite.PLAIN, CUBLAS, 1.0, WORST),
    Goal(4, suite.PRODUCT, suite.KEPT, CUBLAS, 3.5, MEAN),
    Goal(4, suite.PRODUCT, suite.KEPT, CUBLAS, 1.0, WORST),
    Goal(5, suite.SKINNY, suite.PLAIN, CUBLAS, 1.0, WORST),
    Goal(6, suite.TRAINING, suite.PLAIN, ("eager",), 3.0),
    Goal(7, suite.FORCED_PRODUCT, suite.KEPT, CUBLAS, 2.2),
    Goal(7, suite.FORCED_PRODUCT, suite.PLAIN, CUBLAS, 2.2),
)
RIVALS = {(goal.group, goal.contender): goal.rivals for goal in GOALS}


@dataclass(frozen=True)
class SpeedUp:
    """A contender's on one case; not `is_complete` where a rival was not measured."""

    shape: str
    value: float
    ran_cublas: bool
    is_complete: bool

    def limit(self, at_least: float) -> float:
        """`at_least`, or a little less where the kernel is the rival's own."""
        return at_least * NOISE if self.ran_cublas else at_least


def ran_cublas(case: dict[str, Any], contender: str) -> bool:
    """Whether the contender's product was PyTorch's own."""
    path = case["contenders"][contender].get("path") if contender == suite.KEPT else case["path"]
    return (path or "").partition(":")[0] in ("unfused", "composed")


def speed_up(case: dict[str, Any], contender: str) -> SpeedUp | None:
    """The time of the fastest rival that was measured over the contender's; None where there is none."""
    medians = {name: entry["median_us"] for name, entry in case["contenders"].items() if "median_us" in entry}
    rivals = RIVALS[case["group"], contender]
    measured = [medians[name] for name in rivals if name in medians]
    if not measured or contender not in medians:
        return None
    value = min(measured) / medians[contender]
    return SpeedUp(case["shape"], value, ran_cublas(case, contender), len(measured) == len(rivals))


def speed_ups(cases: Sequence[dict[str, Any]], group: str, contender: str) -> list[SpeedUp]:
    """Those of a group's cases that were measured."""
    found = [speed_up(case, contender) for case in cases if case["group"] == group]
    return [value for value in found if value is not None]


def worst_of(cells: Sequence[SpeedUp], at_least: float) -> SpeedUp:
    """The cell that is the furthest below its limit, or the least above it."""
    return min(cells, key=lambda cell: cell.value / cell.limit(at_least))


def outcome(goal: Goal, cells: Sequence[SpeedUp]) -> tuple[float, str, bool]:
    """The figure of a line, the shape that it is of (empty for a mean), and whether it is enough."""
    if goal.measure == MEAN:
        mean = statistics.geometric_mean(cell.value for cell in cells)
        return mean, "", mean >= goal.at_least
    cell = worst_of(cells, goal.at_least)
    limit = cell.limit(goal.at_least) if goal.measure == WORST else goal.at_least
    return cell.value, cell.shape, cell.value >= limit


def line(goal: Goal, cells: Sequence[SpeedUp], full_count: int, is_target: bool) -> dict[str, Any]:
    """A line as JSON holds it. There is a verdict on the target device only, and for the whole of a grid only."""
    value, where, met = outcome(goal, cells) if cells else (None, "", False)
    is_whole = len(cells) == full_count and all(cell.is_complete for cell in cells)
    verdict = ("met" if met else "missed") if is_whole else "not measured"
    return {
        **asdict(goal),
        "cells": len(cells),
        "speed_up": value,
        "where": where,
        "noise": NOISE if goal.measure == WORST else None,
        "verdict": verdict if is_target else None,
    }


def judge(cases: Sequence[dict[str, Any]], device_name: str) -> list[dict[str, Any]]:
    """Every line of the table, from the cases' figures."""
    full = Counter(case.group for case in suite.fp32_cases(small=False, quick=False))
    is_target = device_name == TARGET_DEVICE
    return [line(goal, speed_ups(cases, goal.group, goal.contender), full[goal.group], is_target) for goal in GOALS]
