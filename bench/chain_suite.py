"""The chains suite: what it is held to, the verdicts, and the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.case_loop import Figures, go_on_after, run_cases
from bench.cases import TARGET_DEVICE
from bench.chain_cases import (
    BACKWARD,
    LARGE_GFLOP,
    LINEAR,
    MEMORY,
    MODEL,
    ONE_CHAIN,
    REDUCE,
    SIXTEEN_BITS,
    START,
    STREAM,
    TRAINING,
    Case,
    all_cases,
    chains_of,
    gflop,
)
from bench.chain_contenders import AUTOTUNE, COMPILE, EAGER, MM, POINTWISE, PRODUCT, SPECIALIZED
from bench.chain_functions import LIGHT, SPECIAL
from bench.chain_memory import EAGER_STACK, FUSED_STACK, RECOMPUTED_STACK
from bench.chain_run import Options, run_case
from bench.chain_start import COLD, SECOND
from bench.host_suite import MEAN, WORST
from bench.progress import Progress
from bench.run_files import key_of
from bench.runner import Budget, release
from bench.timing import Effort, clock_for

RATIO, SHARE, SECONDS, BYTES = "ratio", "share", "seconds", "bytes"

EFFORT, QUICK_EFFORT = Effort(1.0, 10, 100), Effort(0.2, 5, 20)
TIME_LIMIT_S = 540.0
# First guesses of what a case takes, by whether max-autotune is in it; of a case of processes, and of a small one.
GUESSES_S = {"plain": 8.0, "autotuned": 45.0, START: 120.0}

Value = Callable[[Figures], float | None]


def median(case: Figures, name: str) -> float | None:
    """A contender's microseconds; None where it was not measured."""
    return case["contenders"].get(name, {}).get("median_us")


def sizes_of(case: Figures) -> tuple[int, int, int]:
    """M, N, K of a product's case."""
    m, n, k = map(int, case["shape"].split("x"))
    return m, n, k


def is_large(case: Figures) -> bool:
    """Whether the product is large enough to run at the device's full rate."""
    return gflop(sizes_of(case)) >= LARGE_GFLOP


def has_full(case: Figures) -> bool:
    """Whether an operand is as large as the result."""
    return bool(case.get("full"))


def over(case: Figures, base: float | None) -> float | None:
    """The specialized kernel's time over another."""
    own = median(case, SPECIALIZED)
    return None if own is None or base is None else own / base


def over_fastest(case: Figures, names: Sequence[str] = (COMPILE, AUTOTUNE)) -> float | None:
    """Over the fastest of others: by default the best of torch.compile's modes."""
    return over(case, min((time for name in names if (time := median(case, name)) is not None), default=None))


def over_product_or_chain(case: Figures) -> float | None:
    """Over the longer of the bare product and the chain alone."""
    times = [median(case, name) for name in (MM, POINTWISE)]
    return None if None in times else over(case, max(time for time in times if time is not None))


def over_product_and_operands(name: str, case: Figures) -> float | None:
    """Over a product, and reading the operands at the copy ceiling."""
    product, reading = median(case, name), case.get("memory_us", 0.0)  # without operands there is nothing to read
    return None if product is None or reading is None else over(case, product + reading)


def share_of_ceiling(case: Figures) -> float | None:
    """The least time of the case's traffic over the specialized kernel's."""
    least, own = case.get("memory_us"), median(case, SPECIALIZED)
    return None if least is None or own is None else least / own


def seconds_of(name: str, case: Figures) -> float | None:
    """How long a process took until its chains ran specialized."""
    return case["contenders"].get(name, {}).get("wait_s")


def over_eager_bytes(name: str, figure: str, case: Figures) -> float | None:
    """A stack's bytes over those of the same blocks in plain PyTorch."""
    own, eager = (case["contenders"].get(stack, {}).get(figure) for stack in (name, EAGER_STACK))
    return own / eager if own is not None and eager else None


@dataclass(frozen=True)
class Goal:
    """A line of the table: a value of those cases of a group that are `chosen` is to keep within `limit`.

    `unit`: SHARE, at least; or at most RATIO, of times, BYTES, a ratio of memory, or SECONDS. `measure`: of the cases,
    the geometric mean or the worst.
    """

    line: int
    group: str
    what: str
    against: str
    value: Value
    limit: float
    chosen: Callable[[Figures], bool] = lambda case: True
    measure: str = WORST
    unit: str = RATIO

    def covers(self, case: Figures) -> bool:
        """Whether a case belongs to the line."""
        return case["group"] == self.group and self.chosen(case)

    def as_dict(self) -> dict[str, Any]:
        """What a line of the results begins with."""
        return {name: getattr(self, name) for name in ("line", "what", "against", "measure", "unit", "limit")}


def of_precisions(precisions: Sequence[str], also: Callable[[Figures], bool]) -> Callable[[Figures], bool]:
    """Cases in one of the precisions that are `also` something else."""
    return lambda case: case["precision"] in precisions and also(case)


def goals_of_products() -> tuple[Goal, ...]:
    """The limits on chains behind products."""
    best, bound = "best torch.compile", "larger of mm and the chain alone"
    large_16 = of_precisions(SIXTEEN_BITS, is_large)
    small_16 = of_precisions(SIXTEEN_BITS, lambda case: not is_large(case))
    tensor_cores = (*SIXTEEN_BITS, "tf32")
    without = of_precisions(tensor_cores, lambda case: is_large(case) and not has_full(case))
    large_full = of_precisions(tensor_cores, lambda case: is_large(case) and has_full(case))
    small_full = of_precisions(tensor_cores, lambda case: not is_large(case) and has_full(case))
    deep = of_precisions(("fp32",), lambda case: sizes_of(case)[2] >= 4096)
    shallow = of_precisions(("fp32",), lambda case: sizes_of(case)[2] < 4096)
    with_mm, with_product = (partial(over_product_and_operands, name) for name in (MM, PRODUCT))
    bytes_too, guarded = "mm and the operands' bytes", "the product alone and the operands' bytes"
    no_full = "16-bit, tf32, 40 GFLOP and more, no full operand"
    return (
        Goal(1, LINEAR, "16-bit, 40 GFLOP and more", best, over_fastest, 0.90, large_16, MEAN),
        Goal(1, LINEAR, "16-bit, 40 GFLOP and more", best, over_fastest, 1.02, large_16),
        Goal(2, LINEAR, "16-bit, smaller", best, over_fastest, 1.0, small_16, MEAN),
        Goal(3, LINEAR, no_full, bound, over_product_or_chain, 1.08, without, MEAN),
        Goal(3, LINEAR, no_full, bound, over_product_or_chain, 1.25, without),
        Goal(4, LINEAR, "16-bit, tf32, 40 GFLOP and more, full operand", bytes_too, with_mm, 1.10, large_full, MEAN),
        Goal(4, LINEAR, "16-bit, tf32, smaller, full operand", bytes_too, with_mm, 1.30, small_full, MEAN),
        Goal(5, LINEAR, 'fp32 at "highest", K of 4096 and more', guarded, with_product, 1.04, deep, MEAN),
        Goal(5, LINEAR, 'fp32 at "highest", smaller K', guarded, with_product, 1.20, shallow, MEAN),
    )


def share_goal(line: int, group: str, what: str, ceiling: str, limit: float, chosen: Callable[[Figures], bool]) -> Goal:
    """A limit on the share of what the memory allows."""
    return Goal(line, group, what, f"{ceiling} ceiling", share_of_ceiling, limit, chosen, unit=SHARE)


def seconds_goal(what: str, name: str, limit: float, variant: str) -> Goal:
    """A limit on the time until chains run specialized."""
    value = partial(seconds_of, name)
    return Goal(10, START, what, "", value, limit, lambda case: case["variant"] == variant, unit=SECONDS)


def training_goal(shape: str, limit: float) -> Goal:
    """A limit on a training step."""
    value = partial(over_fastest, names=(EAGER, COMPILE))
    what = f"training step of linear and gelu, {shape}, bf16"
    return Goal(9, TRAINING, what, "best of eager and torch.compile", value, limit, lambda case: case["shape"] == shape)


def memory_goal(line: int, what: str, name: str, figure: str, limit: float) -> Goal:
    """A limit on the memory of a training step."""
    value = partial(over_eager_bytes, name, figure)
    return Goal(line, MEMORY, f"{what}, training 12 blocks, bf16", "eager", value, limit, unit=BYTES)


GOALS = (
    *goals_of_products(),
    share_goal(6, STREAM, LIGHT.name, "copy", 0.95, lambda case: case["variant"] == LIGHT.name),
    share_goal(6, STREAM, f"{SPECIAL.name}, bf16", "copy", 0.80, lambda case: case["variant"] == SPECIAL.name),
    share_goal(7, BACKWARD, f"backward of {LIGHT.name}", "copy", 0.92, lambda case: True),
    share_goal(8, REDUCE, f"{LIGHT.name}, reduced, fp32", "read", 0.92, lambda case: case["precision"] == "fp32"),
    share_goal(8, REDUCE, f"{LIGHT.name}, reduced, bf16", "read", 0.82, lambda case: case["precision"] == "bf16"),
    training_goal("12608x3072x768", 0.94),
    training_goal("4096x8192x8192", 0.99),
    seconds_goal("a chain runs specialized, cold", COLD, 0.5, ONE_CHAIN),
    seconds_goal("a chain runs specialized, second process", SECOND, 0.02, ONE_CHAIN),
    seconds_goal(f"{MODEL} of a model run specialized, cold", COLD, 5.0, MODEL),
    memory_goal(11, "peak memory", FUSED_STACK, "peak_bytes", 1.0),
    memory_goal(12, "kept between the passes, recomputed", RECOMPUTED_STACK, "kept_bytes", 0.75),
)


def place_of(case: Figures) -> str:
    """A case in a line's cell."""
    return ", ".join((case["variant"], case["shape"], case["precision"]))


def judged(goal: Goal, cases: Sequence[Figures], expected: int, gives_verdict: bool) -> dict[str, Any]:
    """A line as JSON holds it; "not measured" where a case is missing or failed."""
    found = [(value, case) for case in cases if goal.covers(case) and (value := goal.value(case)) is not None]
    value, where = None, ""
    if found and goal.measure == MEAN:
        value = statistics.geometric_mean(own for own, _ in found)
    elif found:
        value, worst = (min if goal.unit == SHARE else max)(found, key=lambda pair: pair[0])
        where = place_of(worst)
    verdict = None
    if gives_verdict and (value is None or len(found) < expected):
        verdict = "not measured"
    elif gives_verdict and value is not None:
        is_met = value >= goal.limit if goal.unit == SHARE else value <= goal.limit
        verdict = "met" if is_met else "missed"
    own = {"cases": len(found), "expected": expected, "value": value, "where": where, "verdict": verdict}
    return {**goal.as_dict(), **own}


def judge(cases: Sequence[Figures], device_name: str, quick: bool, seed: int) -> list[dict[str, Any]]:
    """Every line of the table; there are verdicts on the target device, and none for a part of the draw."""
    every = [case.as_dict() for case in all_cases(False, False, seed)]
    gives_verdict = device_name == TARGET_DEVICE and not quick
    return [judged(goal, cases, sum(map(goal.covers, every)), gives_verdict) for goal in GOALS]


def complete(results: dict[str, Any]) -> None:
    """Work out what follows from the cases: their order, the lines, and what the chains' names stand for."""
    settings = results["settings"]
    small, quick, seed = (settings[name] for name in ("small", "quick", "seed"))
    order = {key_of(case.as_dict()): place for place, case in enumerate(all_cases(small, quick, seed))}
    results["cases"].sort(key=lambda case: order[key_of(case)])
    results["lines"] = judge(results["cases"], str(results["machine"]["device"]), quick or small, seed)
    results["chains"] = [chain.as_dict() for chain in chains_of(seed)]


def settings(small: bool, quick: bool, contenders: Sequence[str], effort: Effort, seed: int) -> dict[str, Any]:
    """How the figures are measured: what runs of one results file have in common."""
    return {
        "small": small,
        "quick": quick,
        "seed": seed,
        "contenders": list(contenders),
        "seconds_per_case": effort.seconds,
        "rounds": [effort.least_rounds, effort.most_rounds],
    }


def effort_of(quick: bool, rounds: int | None) -> Effort:
    """How long each case is measured."""
    effort = QUICK_EFFORT if quick else EFFORT
    return Effort(effort.seconds, rounds, rounds) if rounds else effort


def kind_of(case: Case) -> str:
    """Which cases take about as long."""
    return START if case.group == START else "autotuned" if case.is_autotuned else "plain"


def run_suite(
    cases: Sequence[Case],
    options: Options,
    budget: Budget,
    progress: Progress,
    on_case: Callable[[Figures], None],
    line_of: Callable[[Figures], str],
) -> list[str]:
    """Run `cases`, handing each one's figures to `on_case`; returns the titles of those that the time did not allow."""
    clock = clock_for(options.device)

    def fits(case: Case) -> bool:
        kind = kind_of(case)
        return budget.elapsed() + budget.expected(kind, GUESSES_S[kind]) <= budget.limit_s

    def after(case: Case, seconds: float) -> None:
        budget.note(kind_of(case), seconds)
        go_on_after(case.title, partial(release, options.device))

    measure = partial(run_case, options=options, clock=clock, progress=progress)
    return run_cases(cases, measure, fits, after, progress, on_case, line_of)
