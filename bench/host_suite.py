"""The host suite: what calls and stacks of layers may take of PyTorch's time, and the tables of it."""

from __future__ import annotations

from bench import host_cases as suite
from bench.format import ratio
from bench.goals import MEAN, WORST, median, quotient
from bench.host_run import CUTFUSE, PYTORCH, Group
from bench.host_timing import HOST, TURNS
from bench.suite import Figures, Goal, Results, Suite
from bench.tables import Table, times_columns
from bench.timing import Effort

NAMES = (PYTORCH, CUTFUSE)
EFFORT, QUICK_EFFORT = Effort(0.6, 30, 300), Effort(0.08, 10, 60)
SMALL_STACK, LARGE_STACK = (stack.label for stack in suite.STACKS)
DEVICE_BOUND_STACK = suite.DEVICE_BOUND_STACK.label


def over_pytorch(case: Figures) -> float | None:
    """cutfuse's time over PyTorch's; None where one was not measured."""
    return quotient(median(case, CUTFUSE), median(case, PYTORCH))


def goal(group: Group, at_most: float | None, measure: str = WORST, precision: str = "", shape: str = "") -> Goal:
    """cutfuse's time over PyTorch's is to be `at_most`, in the group's cases of a precision and a shape."""

    def covers(case: Figures) -> bool:
        chosen = precision in ("", case["precision"]) and shape in ("", case["shape"])
        return chosen and case["group"] == group.name

    what = ", ".join(part for part in (group.name, shape.removeprefix("12 blocks "), precision) if part)
    return Goal(f"{what} ({group.time})", group.rival, covers, over_pytorch, at_most, measure)


GOALS = (
    goal(suite.GELU, 0.75),
    goal(suite.RESIDUAL, 0.65),
    goal(suite.ROW_SUM, 0.8),
    goal(suite.BARE, 1.15),
    goal(suite.ONE_OP, 1.5),
    goal(suite.THREE_OPS, 0.7),
    goal(suite.SUM, 1.5),
    goal(suite.DRAWN_GELU, 1.0, MEAN, "fp32"),
    goal(suite.DRAWN_GELU, 1.03, WORST, "fp32"),
    goal(suite.DRAWN_BARE, None, MEAN, "fp32"),
    goal(suite.DRAWN_BARE, None, WORST, "fp32"),
    goal(suite.TRAINING, 0.9, precision="bf16"),
    goal(suite.TRAINING, 1.0, precision="fp32"),
    goal(suite.LAYERS, 1.1),
    goal(suite.FORWARD, 0.65, shape=SMALL_STACK),
    goal(suite.TRAINING_BLOCKS, 0.9, shape=SMALL_STACK),
    goal(suite.FORWARD, 0.8, shape=LARGE_STACK),
    goal(suite.TRAINING_BLOCKS, 0.95, shape=LARGE_STACK),
    goal(suite.COMPILED_FORWARD, 1.02, shape=SMALL_STACK),
    goal(suite.COMPILED_FORWARD, 1.02, shape=LARGE_STACK),
    goal(suite.FORWARD, 0.95, shape=DEVICE_BOUND_STACK),
    goal(suite.TRAINING_BLOCKS, 0.95, shape=DEVICE_BOUND_STACK),
)


def cases_table(results: Results) -> Table:
    """Every case with both times."""
    cases = results["cases"]
    columns = {
        "call": [" ".join(filter(None, (case["group"], case["variant"]))) for case in cases],
        "shape": [case["shape"] for case in cases],
        "ratio": [ratio(over_pytorch(case)) for case in cases],
        "precision": [case["precision"] for case in cases],
        **times_columns(cases, {name: name for name in NAMES}),
    }
    return Table("Every case", columns)


SUITE = Suite(
    name="host",
    cases=lambda *kind: list(suite.host_cases(*kind)),
    goals=GOALS,
    contenders=NAMES,
    tables=lambda results: [cases_table(results)],
    about=[
        f"host: the CPU's time to issue a call, of {TURNS[HOST].timed_calls} calls in a row from an empty queue on; "
        "the device is waited for outside of that time.",
        "whole: host and device, of one call until the device is done; waiting for it is inside.",
        "Medians in microseconds, the two taking turns in random order, garbage collector off, every cache warm.",
    ],
    plots={"host": "bench.host_plot:draw"},
    effort=EFFORT,
    quick_effort=QUICK_EFFORT,
    time_limit_s=240.0,
    judges_quick=True,
)
