"""The fp32 suite: how many times as fast as PyTorch's fp32 cutfuse is to be, and the tables of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import fp32_cases as suite
from bench.accuracy_suite import trade_off_table
from bench.contenders import AUTOTUNE, COMPILE, CONTENDERS, EAGER, FUSED, KEPT, MM, slow_compilers
from bench.format import MISSING, error, figure
from bench.format import ratio as times
from bench.goals import MEAN, WORST, median
from bench.suite import Figures, Goal, Results, Suite
from bench.tables import Table, filled, times_columns

# Where cutfuse runs cuBLAS itself, the two times are of one kernel and differ by noise.
NOISE = 0.98
NAMES = (MM, EAGER, COMPILE, AUTOTUNE, FUSED, KEPT)
RIVALS = {suite.RESIDUAL: suite.PYTORCH, suite.ROW_SUM: suite.PYTORCH, suite.TRAINING: (EAGER,)}  # else cuBLAS
AGAINST = {suite.PYTORCH: "fastest of PyTorch", (EAGER,): "eager", (MM,): "cuBLAS in fp32"}
WEIGHTS = {FUSED: "plain weights", KEPT: "planes kept"}
# The grids of cells, and the contenders whose speed-ups are shown of each.
GRIDS = ((suite.PRODUCT, FUSED), (suite.PRODUCT, KEPT), (suite.SKINNY, FUSED))
OWN_CUBLAS = "*"


def ran_cublas(contender: str, case: Figures) -> bool:
    """Whether the contender's product was PyTorch's own."""
    path: str = case["contenders"][contender].get("path", "")
    return path.partition(":")[0] in ("unfused", "composed")


def speed_up(contender: str, case: Figures) -> float | None:
    """The time of the fastest rival over the contender's; None where one of them was not measured."""
    rivals = [median(case, name) for name in RIVALS.get(case["group"], (MM,))]
    own = median(case, contender)
    return None if own is None or None in rivals else min(filter(None, rivals)) / own


def goal(group: str, contender: str, at_least: float, measure: str = "") -> Goal:
    """A group is to be `at_least` as many times as fast with the contender: a single case, or the cells of a grid."""

    def allowed(case: Figures) -> float:
        return at_least * NOISE if measure == WORST and ran_cublas(contender, case) else at_least

    return Goal(
        f"{group}, {WEIGHTS[contender]}",
        AGAINST[RIVALS.get(group, (MM,))],
        lambda case: case["group"] == group,
        partial(speed_up, contender),
        at_least,
        measure or WORST,
        is_least=True,
        allowed=allowed,
    )


GOALS = (
    goal(suite.RESIDUAL, KEPT, 4.0),
    goal(suite.RESIDUAL, FUSED, 4.0),
    goal(suite.ROW_SUM, KEPT, 4.0),
    goal(suite.ROW_SUM, FUSED, 3.0),
    goal(suite.PRODUCT, FUSED, 3.5, MEAN),
    goal(suite.PRODUCT, FUSED, 1.0, WORST),
    goal(suite.PRODUCT, KEPT, 3.5, MEAN),
    goal(suite.PRODUCT, KEPT, 1.0, WORST),
    goal(suite.SKINNY, FUSED, 1.0, WORST),
    goal(suite.TRAINING, FUSED, 3.0),
    goal(suite.FORCED_PRODUCT, KEPT, 2.2),
    goal(suite.FORCED_PRODUCT, FUSED, 2.2),
)


def speed_up_text(contender: str, case: Figures) -> str:
    """A speed-up with a mark where cutfuse ran cuBLAS itself."""
    value = speed_up(contender, case)
    return MISSING if value is None else times(value) + OWN_CUBLAS * ran_cublas(contender, case)


def times_table(results: Results) -> Table:
    """Every product and model with its speed-ups, times and errors."""
    cases = [case for case in results["cases"] if FUSED in case["contenders"]]
    columns: dict[str, Any] = {
        "case": [case["group"] for case in cases],
        "shape": [case["shape"] for case in cases],
        **{f"times as fast, {WEIGHTS[name]}": [speed_up_text(name, case) for case in cases] for name in WEIGHTS},
    }
    columns |= times_columns(cases, {name: CONTENDERS[name].label for name in NAMES})
    columns["error"] = [figure(case["contenders"][FUSED], "error", error) for case in cases]
    return Table("Times as fast as the fastest of PyTorch", filled(columns))


def cells_of(results: Results, group: str, contender: str) -> dict[tuple[int, str], tuple[float, bool]]:
    """A grid's speed-ups, and whether cutfuse ran cuBLAS itself, by M and "NxK"."""
    found = {}
    for case in results["cases"]:
        value = speed_up(contender, case) if case["group"] == group else None
        if value is not None:
            m, rest = case["shape"].split("x", 1)
            found[int(m), rest] = (value, ran_cublas(contender, case))
    return found


SUITE = Suite(
    name="fp32",
    cases=lambda *kind: list(suite.fp32_cases(*kind)),
    goals=GOALS,
    contenders=NAMES,
    left_out=slow_compilers,
    tables=lambda results: [times_table(results), *trade_off_table(results)],
    about=[
        'PyTorch is at "highest" throughout: its products are cuBLAS in fp32. Medians in microseconds of one '
        "interleaved run; errors are relative, against fp64. The ratio is the fastest rival's time over cutfuse's.",
        f"{OWN_CUBLAS}: cutfuse ran cuBLAS itself. There the two times are of one kernel, and {NOISE} counts as 1. The "
        f"worst cell is the one furthest below its limit; the {MEAN} takes every cell as measured.",
    ],
    plots={"fp32": "bench.fp32_plot:draw", "error-and-time": "bench.accuracy_plot:draw"},
    time_limit_s=240.0,
)
