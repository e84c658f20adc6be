"""The host suite: what it is held to, the verdicts, and the run."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench import host_cases as suite
from bench import specialized
from bench.accuracy import WRONG_ABOVE
from bench.accuracy_suite import frobenius_error
from bench.case_loop import run_cases
from bench.cases import TARGET_DEVICE
from bench.host_calls import Result
from bench.host_cases import Case, Group
from bench.host_timing import TURNS, time_in_turns, wait_for
from bench.progress import Progress
from bench.runner import Budget, one_line, release
from bench.timing import Effort
from bench.workloads import PRECISIONS

PYTORCH, CUTFUSE = "pytorch", "cutfuse"
MEAN, WORST = "geometric mean", "worst"

EFFORT, QUICK_EFFORT = Effort(0.6, 30, 300), Effort(0.08, 10, 60)
# The process is to be done in 40 s after a quick run: torch is imported before, and tables and a plot come after.
TIME_LIMIT_S, QUICK_TIME_LIMIT_S = 240.0, 30.0
# A first guess of what a case takes whose two calls are compiled.
COMPILE_GUESS_S = 8.0


@dataclass(frozen=True)
class Goal:
    """A line of the table: cutfuse's time over PyTorch's is to be `at_most`, where there is a target.

    `measure`: of the group's cases, the geometric mean or the worst. `precision` and `shape` choose among them.
    """

    line: int
    group: Group
    at_most: float | None
    measure: str = WORST
    precision: str = ""
    shape: str = ""

    def as_dict(self) -> dict[str, Any]:
        """What a line of the results begins with."""
        own = {name: getattr(self, name) for name in ("line", "precision", "shape", "measure", "at_most")}
        return {**own, "group": self.group.name, "rival": self.group.rival, "time": self.group.time}


def covers(line: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether a case belongs to a line, both as JSON holds them."""
    chosen = all(line[key] in ("", case[key]) for key in ("precision", "shape"))
    return chosen and line["group"] == case["group"]


SMALL_STACK, LARGE_STACK = (stack.label for stack in suite.STACKS)
DEVICE_BOUND_STACK = suite.DEVICE_BOUND_STACK.label
GOALS = (
    Goal(1, suite.GELU, 0.75),
    Goal(2, suite.RESIDUAL, 0.65),
    Goal(3, suite.ROW_SUM, 0.8),
    Goal(4, suite.BARE, 1.15),
    Goal(5, suite.ONE_OP, 1.5),
    Goal(5, suite.THREE_OPS, 0.7),
    Goal(6, suite.SUM, 1.5),
    Goal(7, suite.DRAWN_GELU, 1.0, MEAN, precision="fp32"),
    Goal(7, suite.DRAWN_GELU, 1.03, precision="fp32"),
    Goal(7, suite.DRAWN_BARE, None, MEAN, precision="fp32"),
    Goal(7, suite.DRAWN_BARE, None, precision="fp32"),
    Goal(8, suite.TRAINING, 0.9, precision="bf16"),
    Goal(8, suite.TRAINING, 1.0, precision="fp32"),
    Goal(9, suite.LAYERS, 1.1),
    Goal(10, suite.FORWARD, 0.65, shape=SMALL_STACK),
    Goal(10, suite.TRAINING_BLOCKS, 0.9, shape=SMALL_STACK),
    Goal(11, suite.FORWARD, 0.8, shape=LARGE_STACK),
    Goal(11, suite.TRAINING_BLOCKS, 0.95, shape=LARGE_STACK),
    Goal(12, suite.COMPILED_FORWARD, 1.02, shape=SMALL_STACK),
    Goal(12, suite.COMPILED_FORWARD, 1.02, shape=LARGE_STACK),
    Goal(13, suite.FORWARD, 0.95, shape=DEVICE_BOUND_STACK),
    Goal(13, suite.TRAINING_BLOCKS, 0.95, shape=DEVICE_BOUND_STACK),
)


def ratio(case: dict[str, Any]) -> float | None:
    """cutfuse's time over PyTorch's; None where one was not measured."""
    medians = [case["contenders"].get(name, {}).get("median_us") for name in (CUTFUSE, PYTORCH)]
    return None if None in medians else medians[0] / medians[1]


def line(goal: Goal, cases: Sequence[dict[str, Any]], full_count: int, is_target: bool) -> dict[str, Any]:
    """A line as JSON holds it. There is a verdict on the target device only, and only where every case was measured."""
    found = [(value, case) for case in cases if (value := ratio(case)) is not None]
    value, where, times = None, "", {PYTORCH: None, CUTFUSE: None}
    if found and goal.measure == MEAN:
        value = statistics.geometric_mean(own for own, _ in found)
    elif found:
        value, worst = max(found, key=lambda pair: pair[0])
        where = f"{worst['shape']} {worst['precision']}"
        times = {name: worst["contenders"][name]["median_us"] for name in times}
    verdict = None
    if is_target and goal.at_most is not None:
        is_whole = value is not None and len(found) == full_count
        verdict = "not measured" if not is_whole else "met" if value <= goal.at_most else "missed"
    return {
        **goal.as_dict(),
        "cases": len(found),
        "ratio": value,
        "where": where,
        **{f"{name}_us": time for name, time in times.items()},
        "verdict": verdict,
    }


def judge(cases: Sequence[dict[str, Any]], device_name: str, quick: bool) -> list[dict[str, Any]]:
    """Every line of the table, from the cases' figures; `quick` tells how many cases a line has."""
    every = [case.as_dict() for case in suite.host_cases(small=False, quick=quick)]
    lines = []
    for goal in GOALS:
        about = goal.as_dict()
        own = [case for case in cases if covers(about, case)]
        full_count = sum(covers(about, case) for case in every)
        lines.append(line(goal, own, full_count, device_name == TARGET_DEVICE))
    return lines


def effort_of(quick: bool, rounds: int | None) -> Effort:
    """How long each case is measured."""
    effort = QUICK_EFFORT if quick else EFFORT
    return Effort(effort.seconds, rounds, rounds) if rounds else effort


def settings(quick: bool, filters: list[str], seed: int, effort: Effort, limit_s: float) -> dict[str, Any]:
    """How the figures were measured, for the results file."""
    return {
        "quick": quick,
        "filter": filters,
        "seed": seed,
        "shape_seed": suite.SHAPE_SEED,
        "time_limit_s": limit_s,
        "seconds_per_case": effort.seconds,
        "rounds": [effort.least_rounds, effort.most_rounds],
        "turns": {name: asdict(turn) for name, turn in TURNS.items()},
    }


def parts_of(result: Result) -> tuple[Tensor, ...]:
    """A call's results, without their graph."""
    return tuple(part.detach() for part in (result if isinstance(result, tuple) else (result,)))


def error_of(result: Result, exact: Result) -> float:
    """The largest relative error among a call's results; raises ValueError where their number or a shape differs."""
    parts, expected = parts_of(result), parts_of(exact)
    shapes, exact_shapes = ([tuple(part.shape) for part in own] for own in (parts, expected))
    if shapes != exact_shapes:
        raise ValueError(f"the results have shapes {shapes}, but should have {exact_shapes}")
    return max(frobenius_error(part, whole) for part, whole in zip(parts, expected, strict=True))


def note_on(call: Callable[[], Result], exact: Result, precision: str) -> str:
    """Why a call is not to be timed: it fails, or its result is wrong. Empty where it is right."""
    try:
        error = error_of(call(), exact)
    except Exception as failure:  # One contender's failure must not lose the other's figure.
        return f"failed: {one_line(failure)}"
    return f"wrong: relative error {error:.1e} against fp64" if error > WRONG_ABOVE[precision] else ""


def run_case(case: Case, device: torch.device, effort: Effort, seed: int) -> dict[str, Any]:
    """Build, check and time one case; its figures as JSON holds them."""
    with torch.set_grad_enabled(case.group.needs_grad), PRECISIONS[case.precision].active():
        built = case.build(device)
        calls = {PYTORCH: built.pytorch, CUTFUSE: built.cutfuse}
        exact = built.exact()
        notes = {name: note_on(call, exact, case.precision) for name, call in calls.items()}
        del exact
        specialized.wait()  # A kernel that is compiled meanwhile slows every call, and then runs in part of them.
        right = {name: call for name, call in calls.items() if not notes[name]}
        times, rounds = time_in_turns(right, TURNS[case.group.time], wait_for(device), effort, seed)
    entries = {name: {"note": note} if note else asdict(times[name]) for name, note in notes.items()}
    return {"rounds": rounds, "contenders": entries}


def fits(case: Case, budget: Budget) -> bool:
    """Whether there is time for the case, its compilations included."""
    compiling = budget.expected("compile", COMPILE_GUESS_S) if case.group.compiles else 0.0
    return budget.elapsed() + compiling <= budget.limit_s


def run_suite(
    cases: Sequence[Case],
    device: torch.device,
    effort: Effort,
    seed: int,
    budget: Budget,
    progress: Progress,
    on_case: Callable[[dict[str, Any]], None],
) -> list[str]:
    """Run `cases`, handing each one's figures to `on_case`; returns the titles of those that the time did not allow."""
    gc.collect()

    def after(case: Case, seconds: float) -> None:
        if case.group.compiles:
            budget.note("compile", seconds)
            release(device)

    return run_cases(
        cases,
        lambda case: run_case(case, device, effort, seed),
        lambda case: fits(case, budget),
        after,
        progress,
        on_case,
    )
