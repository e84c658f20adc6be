"""The chains suite: what chains behind products, and by themselves, are held to, and the tables of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
    UNTIMED,
    all_cases,
    chains_of,
    gflop,
)
from bench.chain_functions import LIGHT, SPECIAL
from bench.chain_memory import EAGER_STACK, FUSED_STACK, RECOMPUTED_STACK
from bench.chain_start import COLD, SECOND
from bench.contenders import (
    COMPILE,
    COMPILERS,
    CONTENDERS,
    EAGER,
    FUSED,
    KEPT,
    MM,
    POINTWISE,
    PRODUCT,
    SPECIALIZED,
    slow_compilers,
)
from bench.format import MISSING, ratio
from bench.goals import MEAN, WORST, fastest, median, quotient
from bench.suite import Figures, Goal, Results, Suite
from bench.tables import Table, filled, times_columns

NAMES = tuple(name for name in CONTENDERS if name not in (FUSED, KEPT))
Value = Callable[[Figures], float | None]
Chosen = Callable[[Figures], bool]


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
    return quotient(median(case, SPECIALIZED), base)


def over_fastest(case: Figures, names: Sequence[str] = COMPILERS) -> float | None:
    """Over the fastest of others: by default the best of torch.compile's modes."""
    return over(case, fastest(case, names))


def over_product_or_chain(case: Figures) -> float | None:
    """Over the longer of the bare product and the chain alone."""
    product, chain = median(case, MM), median(case, POINTWISE)
    return None if product is None or chain is None else over(case, max(product, chain))


def over_product_and_operands(name: str, case: Figures) -> float | None:
    """Over a product, and reading the operands at the copy ceiling."""
    product, reading = median(case, name), case.get("floor_us", 0.0)  # without operands there is nothing to read
    return None if product is None or reading is None else over(case, product + reading)


def share_of_ceiling(case: Figures) -> float | None:
    """The least time of the case's traffic over the specialized kernel's."""
    return quotient(case.get("floor_us"), median(case, SPECIALIZED))


def seconds_of(name: str, case: Figures) -> float | None:
    """How long a process took until its chains ran specialized."""
    seconds: float | None = case["contenders"].get(name, {}).get("wait_s")
    return seconds


def over_eager_bytes(name: str, figure: str, case: Figures) -> float | None:
    """A stack's bytes over those of the same blocks in plain PyTorch."""
    own, eager = (case["contenders"].get(stack, {}).get(figure) for stack in (name, EAGER_STACK))
    return own / eager if own is not None and eager else None


def goal(
    group: str, what: str, against: str, value: Value, limit: float, chosen: Chosen, measure: str = WORST, **more: Any
) -> Goal:
    """A limit on the cases of a group that are chosen."""
    return Goal(what, against, lambda case: case["group"] == group and chosen(case), value, limit, measure, **more)


def every(case: Figures) -> bool:
    """Chooses every case."""
    del case
    return True


def of_precisions(precisions: Sequence[str], also: Chosen = every) -> Chosen:
    """Cases in one of the precisions that are `also` something else."""
    return lambda case: case["precision"] in precisions and also(case)


def goals_of_products() -> tuple[Goal, ...]:
    """The limits on chains behind products."""
    best, bound = "best torch.compile", "mm or the chain alone"
    large_16 = of_precisions(SIXTEEN_BITS, is_large)
    small_16 = of_precisions(SIXTEEN_BITS, lambda case: not is_large(case))
    tensor_cores = (*SIXTEEN_BITS, "tf32")
    without = of_precisions(tensor_cores, lambda case: is_large(case) and not has_full(case))
    large_full = of_precisions(tensor_cores, lambda case: is_large(case) and has_full(case))
    small_full = of_precisions(tensor_cores, lambda case: not is_large(case) and has_full(case))
    deep = of_precisions(("fp32",), lambda case: sizes_of(case)[2] >= 4096)
    shallow = of_precisions(("fp32",), lambda case: sizes_of(case)[2] < 4096)
    with_mm, with_product = (partial(over_product_and_operands, name) for name in (MM, PRODUCT))
    bytes_too, guarded = "mm, operands' bytes", "product, operands' bytes"
    no_full = "16-bit, tf32, ≥ 40 GFLOP, no full operand"
    large_full_name = "16-bit, tf32, ≥ 40 GFLOP, full operand"
    return (
        goal(LINEAR, "16-bit, ≥ 40 GFLOP", best, over_fastest, 0.90, large_16, MEAN),
        goal(LINEAR, "16-bit, ≥ 40 GFLOP", best, over_fastest, 1.02, large_16),
        goal(LINEAR, "16-bit, smaller", best, over_fastest, 1.0, small_16, MEAN),
        goal(LINEAR, no_full, bound, over_product_or_chain, 1.08, without, MEAN),
        goal(LINEAR, no_full, bound, over_product_or_chain, 1.25, without),
        goal(LINEAR, large_full_name, bytes_too, with_mm, 1.10, large_full, MEAN),
        goal(LINEAR, "16-bit, tf32, smaller, full operand", bytes_too, with_mm, 1.30, small_full, MEAN),
        goal(LINEAR, "fp32, K ≥ 4096", guarded, with_product, 1.04, deep, MEAN),
        goal(LINEAR, "fp32, smaller K", guarded, with_product, 1.20, shallow, MEAN),
    )


def share_goal(group: str, what: str, ceiling: str, limit: float, chosen: Chosen = every) -> Goal:
    """A limit on the share of what the memory allows."""
    return goal(group, what, f"{ceiling} ceiling", share_of_ceiling, limit, chosen, is_least=True)


def seconds_goal(what: str, name: str, limit: float, variant: str) -> Goal:
    """A limit on the time until chains run specialized."""
    value = partial(seconds_of, name)
    return goal(START, what, "", value, limit, lambda case: case["variant"] == variant, unit=" s")


def training_goal(shape: str, limit: float) -> Goal:
    """A limit on a training step."""
    value = partial(over_fastest, names=(EAGER, COMPILE))
    what = f"training step, {shape}"
    return goal(TRAINING, what, "best of PyTorch", value, limit, lambda case: case["shape"] == shape)


def memory_goal(what: str, name: str, figure: str, limit: float) -> Goal:
    """A limit on the memory of a training step."""
    value = partial(over_eager_bytes, name, figure)
    return goal(MEMORY, f"{what}, 12 blocks", "eager", value, limit, every)


GOALS = (
    *goals_of_products(),
    share_goal(STREAM, LIGHT.name, "copy", 0.95, lambda case: case["variant"] == LIGHT.name),
    share_goal(STREAM, f"{SPECIAL.name}, bf16", "copy", 0.80, lambda case: case["variant"] == SPECIAL.name),
    share_goal(BACKWARD, f"backward of {LIGHT.name}", "copy", 0.92),
    share_goal(REDUCE, f"{LIGHT.name}, reduced, fp32", "read", 0.92, of_precisions(("fp32",))),
    share_goal(REDUCE, f"{LIGHT.name}, reduced, bf16", "read", 0.82, of_precisions(("bf16",))),
    training_goal("12608x3072x768", 0.94),
    training_goal("4096x8192x8192", 0.99),
    seconds_goal("a chain runs specialized, cold", COLD, 0.5, ONE_CHAIN),
    seconds_goal("a chain runs specialized, second process", SECOND, 0.02, ONE_CHAIN),
    seconds_goal(f"{MODEL} run specialized, cold", COLD, 5.0, MODEL),
    memory_goal("peak memory", FUSED_STACK, "peak_bytes", 1.0),
    memory_goal("kept for backward, recomputed", RECOMPUTED_STACK, "kept_bytes", 0.75),
)


def times_table(title: str, cases: Sequence[Figures]) -> Table:
    """Cases with their ratios and the times of each contender."""
    columns = {
        "chain": [f"{case['group']}: {case['variant']}" for case in cases],
        "shape": [case["shape"] for case in cases],
        "specialized / compiled": [ratio(over_fastest(case)) for case in cases],
        "specialized / mm": [ratio(over(case, median(case, MM))) for case in cases],
        "precision": [case["precision"] for case in cases],
        **times_columns(cases, {name: CONTENDERS[name].label for name in NAMES}),
    }
    return Table(title, filled(columns))


def chains_table(results: Results) -> Table:
    """What the chains' names stand for."""
    chains = [chain.as_dict() for chain in chains_of(results["settings"]["seed"])]
    columns = {
        "chain": [chain["name"] for chain in chains],
        "ops": [str(chain["ops"]) for chain in chains],
        "text": [chain["text"] for chain in chains],
        "operands": [chain["operands"] or MISSING for chain in chains],
        "reduce": [chain["reduce"] or MISSING for chain in chains],
    }
    return Table("The chains: z is the product, a, b, c are the operands", columns)


def tables(results: Results) -> list[Table]:
    """Every timed case, and the chains."""
    cases = [case for case in results["cases"] if case["group"] not in UNTIMED]
    products = [case for case in cases if case["group"] == LINEAR]
    others = [case for case in cases if case["group"] != LINEAR]
    return [
        times_table("Chains behind products", products),
        times_table("Without a chain behind a product", others),
        chains_table(results),
    ]


SUITE = Suite(
    name="chains",
    cases=all_cases,
    goals=GOALS,
    contenders=NAMES,
    left_out=slow_compilers,
    tables=tables,
    about=[
        "The device's time, from a cold cache: medians in microseconds, contenders interleaved in random order within "
        "a case. Every result was compared with fp64 before, cutfuse's a second time over memory filled with NaN.",
        'Products have no bias; fp32 is at "highest" and tf32 at "high". Compiled: the faster of torch.compile and, '
        "where it was run, max-autotune.",
        "specialized, of which the ratios are: compiled for the chain before it is timed. interpreted: the same call "
        "with specialization off.",
        "mm or the chain alone: the longer; the latter is `cutfuse.pointwise` over `[M, N]` without its reduction. The "
        "product alone is `cutfuse.linear` without an epilogue. A full operand is as large as the result.",
        "Operands' bytes are counted at the ceiling of a copy, and ratios to a ceiling are shares of it.",
        "Until a chain runs specialized: from its first call in a process that has run another chain interpreted; cold "
        "without any cache of compiled kernels, the second process with the first one's. Medians of processes.",
        "Training step: a linear layer and gelu in bf16. Memory: of a step of pre-norm MLP blocks, beyond parameters "
        "and input; kept between the passes with `recompute` in the layer before gelu.",
    ],
    plots={"chains": "bench.chain_plot:draw"},
    time_limit_s=540.0,
)
